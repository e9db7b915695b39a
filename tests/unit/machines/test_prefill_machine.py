"""One prefill worker's brain among decode workers and an engine that do anything, in any order (I1, I2, I8).

The books here know of every job what must have been offered by now, and what each offered block holds. A job is
answered by exactly one of Refused, Failed and Done, and by nothing once it is cancelled, taken or its link is gone.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from cluster.core.keys import KeyChain, root_key
from cluster.stubs.common_pb2 import Blame, Sampling
from cluster.stubs.link_pb2 import (
    BlockRef,
    CancelJob,
    FromDecodePeer,
    FromPrefill,
    Job,
    PrefillHello,
    Recheck,
    Taken,
    Warmed,
)
from engine.messages import Command, Digest, DigestDone, Poison, Report, RowError, Serve, Step, StepDone
from prefill_worker.core import PrefillCore
from prefill_worker.effects import Lost, ToDecode, ToEngine
from tests.stateful import long, quick
from tests.unit.machines.paper import (
    EMPTY,
    LAYOUT,
    MAX_CONTEXT,
    VOCABULARY,
    B,
    Content,
    PaperEngine,
    config,
    contents,
    digest_of,
    draw,
    identity,
)

BLOCKS = 8
LINKS = ("d0", "d1")
TEXTS = [list(range(100 * t, 100 * t + 5 * B)) for t in (1, 2)]
illegal_reports = st.sampled_from([StepDone(9999, [], [], {}, 0.0), DigestDone(9999, [])])
jobs = st.builds(
    Job,
    tokens=st.tuples(st.sampled_from(TEXTS), st.integers(1, 5 * B)).map(lambda drawn: drawn[0][: drawn[1]]),
    sample_indices=st.sampled_from([[0], [0], [0, 1], [3], []]),
    sampling=st.integers(0, 3).map(lambda seed: Sampling(top_p=1.0, logprobs=-1, seed=seed)),
    salt=st.sampled_from([b"", b"", b"tenant"]),
    deadline_s=st.sampled_from([30.0, 1.0]),
)
nonsense = st.sampled_from(
    [Job(attempt=""), Job(attempt="x"), Job(attempt="x", tokens=[VOCABULARY]), Job(attempt="x", tokens=[-1]),
     Job(attempt="x", tokens=[1], first_position=2), Job(attempt="x", tokens=[1], sample_indices=[0, 0]),
     Job(attempt="x", tokens=[1] * (MAX_CONTEXT + 1)), Job(attempt="x", tokens=[1], deadline_s=float("nan"))]
)  # fmt: skip


@dataclass
class Asked:
    """A job as its decode worker sees it."""

    job: Job
    deadline: float
    next_block: int
    answered: str = ""  # accepted, then one of refused, failed, done
    first: bool = False
    offered: dict[int, Content] = field(default_factory=dict)  # block there -> what it holds


class PrefillWorker(RuleBasedStateMachine):
    """Decode workers d0 and d1."""

    @initialize(window=st.sampled_from([6, 100]), wanted=st.lists(jobs, min_size=1, max_size=3))
    def begin(self, window: int, wanted: list[Job]) -> None:
        hello = PrefillHello(identity=identity("p", "prefill"), agent="p", block_bytes=LAYOUT.block_bytes)
        settings = config(BLOCKS, admission_window_tokens=window)
        self.core = PrefillCore(settings, hello, vocab_size=VOCABULARY, max_context=MAX_CONTEXT)
        self.now = 100.0
        self.engine = PaperEngine(BLOCKS)
        self.told: deque[tuple[Command, list[list[int]], float]] = deque()
        self.serving = False
        self.links: set[str] = set()
        self.warming: set[str] = set()
        self.asked: dict[tuple[str, str], Asked] = {}
        self.number = 0
        self.rechecks: list[tuple[str, list[BlockRef]]] = []
        self.open_link("d0")
        self.ask("d0", wanted)

    # -- decode workers -------------------------------------------------------------------------------------------

    @rule(link=st.sampled_from(LINKS))
    def open_link(self, link: str) -> None:
        if link not in self.links:
            self.links.add(link)
            self.warming.add(link)
            self.core.link_opened(link, identity(link, "decode"), self.now)
            self.settle()

    @rule(link=st.sampled_from(LINKS))
    def close_link(self, link: str) -> None:
        self.links.discard(link)
        self.warming.discard(link)
        self.asked = {key: asked for key, asked in self.asked.items() if key[0] != link}
        self.core.link_closed(link, self.now)
        self.settle()

    @precondition(lambda self: self.links)
    @rule(link=st.sampled_from(LINKS), wanted=st.lists(jobs, min_size=1, max_size=3), single=st.booleans())
    def ask(self, link: str, wanted: list[Job], single: bool = False) -> None:
        """`single`: only a first token is wanted, no blocks."""
        for drawn in wanted if link in self.links else []:
            self.number += 1
            job = Job(attempt=f"a{self.number}")
            job.MergeFrom(drawn)
            have = self.number % (len(job.tokens) // B + 1)  # blocks that the decode worker has already
            job.first_position = len(job.tokens) if single and job.sample_indices else have * B
            asked = Asked(job, self.now + job.deadline_s, job.first_position // B)
            self.asked[link, job.attempt] = asked
            self.tell(link, FromDecodePeer(job=job))
            assert asked.answered, "neither accepted nor refused"

    @rule(
        link=st.sampled_from(LINKS),
        wanted=st.lists(jobs, max_size=2),
        count=st.integers(1, 30),
        rotten=st.sampled_from([False, False, True]),
    )
    def cooperate(self, link: str, wanted: list[Job], count: int, rotten: bool) -> None:
        """Some more work, and an engine that does it: without it few histories would get beyond a first chunk."""
        if rotten:
            self.compute(99)
            self.rot()
        self.open_link(link)
        self.ask(link, wanted)
        self.compute(count)

    @rule(link=st.sampled_from(LINKS), job=nonsense)
    def ask_nonsense(self, link: str, job: Job) -> None:
        before = self.books()
        self.core.from_decode(link, FromDecodePeer(job=job), self.now)
        [answer] = [effect for effect in self.core.take_effects() if isinstance(effect, ToDecode)]
        assert answer.message.failed.blame == Blame.BLAME_REQUEST
        assert self.books() == before

    @precondition(lambda self: self.core.jobs)
    @rule(data=st.data())
    def ask_under_a_name_in_use(self, data: st.DataObject) -> None:
        link, attempt = data.draw(st.sampled_from(sorted(self.core.jobs)))
        self.ask_nonsense(link, Job(attempt=attempt, tokens=[1]))

    @rule(data=st.data(), link=st.sampled_from(LINKS), how=st.sampled_from(["cancel", "taken"]), twice=st.booleans())
    def let_go(self, data: st.DataObject, link: str, how: str, twice: bool) -> None:
        """In any phase, also after the end, also twice, also by a link whose job it is not."""
        attempt = data.draw(st.sampled_from(["nobody", *(name for _, name in self.asked)]))
        self.asked.pop((link, attempt), None)
        taken = FromDecodePeer(taken=Taken(attempt=attempt, all=True))
        for _ in range(1 + twice):
            self.tell(link, FromDecodePeer(cancel=CancelJob(attempt=attempt)) if how == "cancel" else taken)
        assert (link, attempt) not in self.core.jobs

    @rule(data=st.data(), link=st.sampled_from(LINKS), off_by=st.sampled_from([0, 0, -1, 1, 2**31]))
    def recheck(self, data: st.DataObject, link: str, off_by: int) -> None:
        """Doubt blocks that were offered, or others."""
        offered = [b for asked in self.asked.values() for b in asked.offered]
        block = data.draw(st.sampled_from([-1, 0, BLOCKS - 1, BLOCKS, *offered]))
        known = self.core.books.generation(block) if 0 <= block < BLOCKS else 0
        refs = [BlockRef(block=block, generation=known + off_by)]
        self.rechecks.append((link, refs))
        self.tell(link, FromDecodePeer(recheck=Recheck(attempt="any", blocks=refs)))

    @precondition(lambda self: self.links)
    @rule(data=st.data(), needs_polling=st.booleans())
    def warmed(self, data: st.DataObject, needs_polling: bool) -> None:
        link = data.draw(st.sampled_from(sorted(self.links)))
        self.warming.discard(link)
        self.tell(link, FromDecodePeer(warmed=Warmed(needs_polling=needs_polling)))

    @rule(link=st.sampled_from(LINKS))
    def say_nothing(self, link: str) -> None:
        self.tell(link, FromDecodePeer())

    def tell(self, link: str, message: FromDecodePeer) -> None:
        self.core.from_decode(link, message, self.now)
        self.settle()

    # -- the engine and time --------------------------------------------------------------------------------------

    @precondition(lambda self: self.told)
    @rule(count=st.integers(1, 8))
    def compute(self, count: int) -> None:
        for _ in range(count):
            if not self.told:
                return
            command, truths, _ = self.told.popleft()
            match command:
                case Step():
                    self.report(self.engine.step(command, truths))
                case Digest():
                    self.report(DigestDone(command.id, self.engine.digest(command.blocks)))
                case Poison():
                    self.engine.poison(command.blocks)

    @precondition(lambda self: isinstance(self.told and self.told[0][0], Step))
    @rule(data=st.data())
    def refuse_a_row(self, data: st.DataObject) -> None:
        """A step one row of which the engine cannot run: its job fails, the others go on."""
        command, truths, _ = self.told.popleft()
        assert isinstance(command, Step)
        done = self.engine.step(command, truths)
        bad = data.draw(st.integers(0, len(command.rows) - 1))
        self.report(StepDone(done.plan, done.samples, done.filled, {bad: RowError("cannot")}, 0.01))

    @rule(report=illegal_reports)
    def report_what_was_never_asked(self, report: Report) -> None:
        before = self.books()
        with pytest.raises(IntegrityError):
            self.core.from_engine(report, self.now)
        assert self.core.take_effects() == []
        assert self.books() == before

    def rot(self) -> None:
        """Bytes of all blocks that nobody owns change: whoever matches one must notice."""
        books = self.core.books
        if not self.told:  # else a row in flight may still read what it is about
            for block in range(BLOCKS):
                if books.is_published(block) and not books._owners[block]:
                    self.engine.blocks[block] = EMPTY

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.5, 6.0]))
    def tick(self, seconds: float) -> None:
        while self.told and self.now + seconds - self.told[0][2] > 9:
            self.compute(1)
        self.now += seconds
        self.core.tick(self.now)
        self.settle()
        assert not any(self.now > asked.deadline for key, asked in self.asked.items() if key in self.core.jobs)

    @rule(hand_over=st.booleans(), really=st.sampled_from([False] * 9 + [True]))
    def drain(self, hand_over: bool, really: bool) -> None:
        if really:
            self.core.draining = True
            if hand_over:
                self.core.hand_over(self.now)
                self.settle()
                assert not self.core.jobs

    def report(self, report: Report) -> None:
        self.core.from_engine(report, self.now)
        self.settle()

    # -- what the core wants --------------------------------------------------------------------------------------

    def settle(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case ToEngine(Serve(on)):
                    assert on != self.serving, "told the engine what it does already"
                    self.serving = on
                case ToEngine(command):
                    known = self.core.batcher.sequences
                    rows = command.rows if isinstance(command, Step) else []
                    truths = [known[r.sequence].tokens[: r.start + len(r.tokens or [])] for r in rows]
                    self.told.append((command, truths, self.now))
                case ToDecode(link, message):
                    self.hear(link, message)
                case Lost():
                    raise AssertionError(f"the worker gave up: {effect}")

    def hear(self, link: str, message: FromPrefill) -> None:
        kind = message.WhichOneof("message") or ""
        if kind == "hello":
            return
        word = getattr(message, kind)
        if kind == "recheck":
            self.rechecked(link, [(b.block, b.generation, b.current) for b in word.blocks])
            return
        asked = self.asked.get((link, word.attempt))
        assert asked is not None, f"{kind} about a job that is over"
        tokens = list(asked.job.tokens)
        if kind in ("accepted", "refused"):
            assert not asked.answered
            asked.answered = kind
            return
        leaving = kind == "failed" and word.reason == "draining"  # its blocks go, even if all is done
        assert asked.answered == "accepted" or (leaving and asked.answered == "done"), f"{kind} after {asked.answered}"
        if kind == "offer":
            start, right = word.first_position // B, contents(tokens)
            keys = KeyChain(root_key(b"weights", salt=asked.job.salt), B).extend(tokens)
            assert start == asked.next_block, "offers out of order"
            for at, block in enumerate(word.blocks, start):
                assert (block.key, block.digest) == (keys[at], digest_of(right[at]))
                assert self.engine.blocks[block.block] == right[at], "offered before it was there"
                asked.offered[block.block] = right[at]
            asked.next_block = start + len(word.blocks)
        elif kind == "first":
            assert not asked.first
            asked.first = True
            wanted = list(asked.job.sample_indices)
            assert [t.index for t in word.tokens] == wanted
            assert [t.id for t in word.tokens] == [draw(tokens, i, asked.job.sampling.seed) for i in wanted]
        else:
            asked.answered = kind
            if kind == "done":
                assert asked.first or not asked.job.sample_indices
                assert asked.next_block == max(len(tokens) // B, asked.job.first_position // B), "blocks left out"
            else:
                asked.offered.clear()

    def rechecked(self, link: str, words: list[tuple[int, int, bool]]) -> None:
        expected = next(refs for whose, refs in self.rechecks if whose == link)
        self.rechecks.remove((link, expected))
        assert [(b, g) for b, g, _ in words] == [(ref.block, ref.generation) for ref in expected]
        for block, generation, current in words:
            real = 0 <= block < BLOCKS and generation == self.core.books.generation(block)
            assert real or not current, "vouched for a block of another life"

    # -- what always holds ----------------------------------------------------------------------------------------

    def books(self) -> dict[str, object]:
        """What an illegal move may not change."""
        jobs_now = {key: (job.phase, job.next_offer) for key, job in self.core.jobs.items()}
        generations = [self.core.books.generation(block) for block in range(BLOCKS)]
        return {"jobs": jobs_now, "generations": generations, "gauges": dict(self.core.status().gauges)}

    @invariant()
    def audit(self) -> None:
        self.core.check_integrity()
        running = {key for key, asked in self.asked.items() if asked.answered == "accepted"}
        assert running <= set(self.core.jobs), "an accepted job was forgotten"
        assert set(self.core.jobs) <= set(self.asked), "a job of nobody"
        for key in self.core.jobs:
            for block, content in self.asked[key].offered.items():
                assert self.engine.blocks[block] == content, "an offered block was written while it was pinned"
        assert self.serving or not self.warming, "a link cannot be set up without the engine's help"
        assert sum(isinstance(told[0], Step) for told in self.told) == self.core.batcher.in_flight
        if not self.core.jobs and not self.core.batcher.in_flight:
            assert self.core.status().gauges["blocks_in_use"] == 0, "blocks without an owner"

    def teardown(self) -> None:
        """The engine goes on and time passes: each job comes to its end, and then nothing is held."""
        if not hasattr(self, "core"):
            return
        for _ in range(50):
            self.compute(50)
            self.audit()
        self.tick(6.0)
        self.compute(50)
        assert not any(self.core.status().gauges.values()), f"still held: {self.core.status().gauges}"
        unended = [key for key, asked in self.asked.items() if asked.answered == "accepted"]
        assert not unended, f"{unended} had no outcome"
        assert not self.rechecks, "a recheck without an answer"
        for link in LINKS:
            self.close_link(link)
        self.tick(6.0)
        assert not self.serving, "the engine polls for nobody"


TestPrefillWorker = quick(PrefillWorker, examples=60, steps=30)
TestPrefillWorkerLong = long(PrefillWorker, examples=400, steps=60)
