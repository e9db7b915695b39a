"""One decode worker's brain among routers, prefill workers and an engine that do anything, in any order (I1-I4, I8).

Honest words and illegal ones, from the right peer and from another; reads that fail, bring other bytes, or end long
after they were given up. After every rule the core's books are audited and compared with those of `decode_outside.py`;
when all is over nothing may be held.
"""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from cluster.stubs.link_pb2 import (
    First,
    FirstToken,
    FromPrefill,
    JobDone,
    JobFailed,
    JobRefused,
    Offer,
    OfferedBlock,
    RecheckedBlock,
    RecheckResult,
)
from cluster.stubs.session_pb2 import CancelAttempt, FromRouter, StopSeq, Submit
from decode_worker.attempts import Phase
from decode_worker.effects import ToRouter
from engine.messages import (
    Copy,
    CopyDone,
    DigestDone,
    ReadDone,
    ReadFailed,
    Report,
    Step,
    StepDone,
)
from tests.stateful import long, quick
from tests.unit.machines.decode_outside import BLAMES, Outside, Wish
from tests.unit.machines.paper import EMPTY, B

ROUTERS = ("r0", "r1")
RESUME_S = 5.0  # timing.resume_s
PATIENCE_S = 9.0  # an engine that owes an answer for longer is lost; that is another test's subject
TEXTS = [list(range(100 * t, 100 * t + 3 * B)) for t in (1, 2)]  # prompts are beginnings of these
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 2 * B, 3 * B - 1, 3 * B)

illegal_reports = st.sampled_from(
    [StepDone(9999, [], [], {}, 0.0), CopyDone(9999, [], 0.0), ReadDone(9999, 0.0), ReadFailed(9999, "?"),
     DigestDone(9999, [])]
)  # fmt: skip
numbers = st.sampled_from([-(2**31), -1, 0, 1, 2, 5, B, 2 * B, 1000, 2**31 - 1])
offered_blocks = st.builds(
    OfferedBlock, block=numbers, generation=numbers, key=st.sampled_from([b"", b"k" * 16]), digest=st.just(b"d")
)


wishes = st.builds(
    Wish,
    session=st.integers(0, 1),
    prompt=st.tuples(st.sampled_from(TEXTS), st.sampled_from(LENGTHS)).map(lambda drawn: drawn[0][: drawn[1]]),
    known=st.sampled_from([(0,), (0,), (3,), (0, 0), (1, 0), (6, 0)]),
    max_tokens=st.integers(1, 16),
    seed=st.integers(0, 3),
    prefill=st.sampled_from(["p0", "p1", "p0 p1", "p1 p0", ""]),
    local=st.sampled_from([0, 0, 5]),
    tenant=st.sampled_from([b"", b"", b"tenant"]),
    preemptions=st.sampled_from([0, 0, 2]),
    stops=st.sampled_from([(), (), (), range(100, 300)]),
    deadline=st.sampled_from([30.0, 30.0, 30.0, 1.0]),
    waited=st.sampled_from([0.0, 5.0]),
)
some = st.lists(wishes, min_size=1, max_size=4)


class DecodeWorker(RuleBasedStateMachine):
    """Routers r0 and r1, holders p0 and p1."""

    @initialize(blocks=st.sampled_from([12, 15]), wait_line=st.sampled_from([4, 1, 0]), warm=st.booleans(), wishes=some)
    def begin(self, blocks: int, wait_line: int, warm: bool, wishes: list[Wish]) -> None:
        self.out = Outside(blocks, wait_line)
        self.drained = False
        if warm:
            self.out.core.warm([holder.address for holder in self.out.holders.values()])
            self.out.settle()
        self.out.open_session("r0")
        self.submit(wishes)

    # -- routers --------------------------------------------------------------------------------------------------

    @rule(
        wanted=st.lists(wishes, max_size=4),
        moves=st.sampled_from([150, 40, 10]),
        seed=st.integers(0, 999),
        torn=st.sampled_from([False, False, True]),
        rotten=st.sampled_from([False, False, True]),
    )
    def cooperate(self, wanted: list[Wish], moves: int, seed: int, torn: bool, rotten: bool) -> None:
        """Everybody does what they should for a while: without it hardly a history would get beyond its first steps.

        `torn`: but what reads bring is not what was offered. `rotten`: nor are cached blocks what they were.
        """
        if rotten:
            self.rot()
        for wish in wanted:
            self.out.ask(wish)
        self.out.torn = torn
        chance = random.Random(seed)
        for _ in range(moves):
            chance.choice(self.out.honest_moves())()
            self.out.core.check_integrity()
        self.out.torn = False

    @rule(data=st.data(), router=st.sampled_from(ROUTERS))  # beside one that is open, too: the newest counts
    def open_session(self, data: st.DataObject, router: str) -> None:
        self.out.open_session(router, data.draw(st.sampled_from(["nobody", *self.out.asks])))

    @rule(router=st.sampled_from(ROUTERS))
    def close_session(self, router: str) -> None:
        if router in self.out.sessions:
            self.out.close_session(router)

    @precondition(lambda self: self.out.sessions)
    @rule(wishes=some)
    def submit(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.out.ask(wish)

    @precondition(lambda self: self.out.core.state.attempts)
    @rule(data=st.data(), router=st.sampled_from(ROUTERS))
    def submit_nonsense(self, data: st.DataObject, router: str) -> None:
        attempt = data.draw(st.sampled_from(["", *sorted(self.out.core.state.attempts)]))
        if router not in self.out.sessions:
            return
        before = self.books()
        nonsense = FromRouter(submit=Submit(attempt=attempt, prompt=[1], max_tokens=1))
        self.out.core.from_router(self.out.sessions[router], nonsense, self.out.now)
        effects = self.out.core.take_effects()
        refused = [e for e in effects if isinstance(e, ToRouter) and e.message.HasField("refused")]
        assert [e.message.refused.permanent for e in refused] == [True]
        for effect in effects:
            if effect not in refused:
                self.out._carry(effect)
        assert self.books()["attempts"] == before["attempts"]

    @rule(data=st.data(), router=st.sampled_from(ROUTERS), twice=st.booleans())
    def cancel(self, data: st.DataObject, router: str, twice: bool) -> None:
        """In any state, also after the end, also twice, also by a router whose it is not."""
        attempt = data.draw(st.sampled_from(["nobody", *self.out.asks]))
        ask = self.out.asks.get(attempt)
        if router not in self.out.sessions:
            return
        if ask is not None and ask.router == router and ask.live:
            ask.over = "cancelled"
        for _ in range(1 + twice):
            self.out.tell(router, FromRouter(cancel=CancelAttempt(attempt=attempt)))
        assert ask is None or ask.router != router or attempt not in self.out.core.state.attempts

    @rule(data=st.data(), router=st.sampled_from(ROUTERS), index=st.sampled_from([-1, 0, 0, 1, 7]))
    def stop(self, data: st.DataObject, router: str, index: int) -> None:
        attempt = data.draw(st.sampled_from(["nobody", *self.out.asks]))
        ask = self.out.asks.get(attempt)
        if router not in self.out.sessions:
            return
        if ask is not None and ask.router == router and 0 <= index < len(ask.got):
            ask.stopped.add(index)
        self.out.tell(router, FromRouter(stop_seq=StopSeq(attempt=attempt, index=index)))

    # -- links ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: "dialled" in self.out.links.values())
    @rule(
        data=st.data(),
        hello=st.sampled_from(["good", "good", "another epoch", "another model", "another agent", "nobody"]),
    )
    def answer_a_dial(self, data: st.DataObject, hello: str) -> None:
        peer = data.draw(st.sampled_from([p for p, state in self.out.links.items() if state == "dialled"]))
        if hello == "nobody":
            self.out.close_link(peer)
            return
        if hello == "good":
            self.out.greet(peer)
            return
        words = self.out.holders[peer].hello()
        if hello == "another epoch":
            words.identity.epoch = 7
        elif hello == "another model":
            words.identity.fingerprint = b"others"
        else:
            words.agent = "p9"
        self.out.core.link_opened(peer, words, self.out.now)
        self.out.settle()
        assert peer not in self.out.links, "kept a link to one who is another"

    @precondition(lambda self: "up" in self.out.links.values())
    @rule(data=st.data())
    def lose_a_link(self, data: st.DataObject) -> None:
        self.out.close_link(data.draw(st.sampled_from([p for p, s in self.out.links.items() if s == "up"])))

    # -- what holders say -----------------------------------------------------------------------------------------

    def job(self, data: st.DataObject) -> tuple[str, str] | None:
        jobs = [(peer, a) for peer, holder in self.out.holders.items() for a in holder.works]
        return data.draw(st.sampled_from(jobs)) if jobs else None

    @precondition(lambda self: any(holder.works for holder in self.out.holders.values()))
    @rule(data=st.data(), count=st.integers(1, 3), accept=st.booleans())
    def work_on_a_job(self, data: st.DataObject, count: int, accept: bool) -> None:
        job = self.job(data)
        assert job is not None
        peer, attempt = job
        if accept:
            self.out.accept(peer, attempt)
        if attempt in self.out.holders[peer].works:
            self.out.work(peer, attempt, count)

    @precondition(lambda self: any(holder.works for holder in self.out.holders.values()))
    @rule(data=st.data(), how=st.sampled_from(["refused", "failed", "invalid", "could not run"]))
    def turn_a_job_away(self, data: st.DataObject, how: str) -> None:
        job = self.job(data)
        assert job is not None
        peer, attempt = job
        self.out.holders[peer].works.pop(attempt)
        self.out.asks[attempt].invalid |= how == "invalid"
        if how == "refused":
            self.out.say(peer, FromPrefill(refused=JobRefused(attempt=attempt, reason="busy")))
        else:
            failed = JobFailed(attempt=attempt, reason="a reason", blame=BLAMES[how])
            self.out.say(peer, FromPrefill(failed=failed))

    @precondition(lambda self: any(holder.works for holder in self.out.holders.values()))
    @rule(data=st.data(), what=st.sampled_from(["again", "wrong digest", "evicted"]))
    def offer_askew(self, data: st.DataObject, what: str) -> None:
        """Blocks offered again and in any order, with a digest of other bytes, or overwritten since."""
        job = self.job(data)
        assert job is not None
        peer, attempt = job
        holder = self.out.holders[peer]
        work = holder.works[attempt]
        if not work.blocks:
            return
        offer = holder.offer(attempt, data.draw(st.integers(0, len(work.blocks) - 1)), 2)
        if what == "wrong digest":
            offer.blocks[0].digest = b"wrong"
        elif what == "evicted":
            holder.memory[offer.blocks[0].block] = EMPTY
        self.out.say(peer, FromPrefill(offer=offer))

    @precondition(lambda self: any(holder.rechecks for holder in self.out.holders.values()))
    @rule(data=st.data(), current=st.booleans())
    def answer_a_recheck(self, data: st.DataObject, current: bool) -> None:
        peer = data.draw(st.sampled_from([p for p, holder in self.out.holders.items() if holder.rechecks]))
        self.out.answer_recheck(peer, current)

    @precondition(lambda self: "up" in self.out.links.values())
    @rule(data=st.data(), kind=st.sampled_from(["offer", "first", "recheck", "nothing", "done"]), at=numbers)
    def say_what_nobody_should(self, data: st.DataObject, kind: str, at: int) -> None:
        """About any attempt, whoever's it is: it costs a holder its job at most."""
        peer = data.draw(st.sampled_from([p for p, state in self.out.links.items() if state == "up"]))
        attempt = data.draw(st.sampled_from(["nobody", *self.out.asks]))
        if kind == "offer":
            blocks = data.draw(st.lists(offered_blocks, min_size=1, max_size=3))
            message = FromPrefill(offer=Offer(attempt=attempt, first_position=at, blocks=blocks))
        elif kind == "first":
            message = FromPrefill(first=First(attempt=attempt, tokens=[FirstToken(index=at, id=-1)]))
        elif kind == "recheck":
            blocks_found = [RecheckedBlock(block=at, generation=g, current=c) for g in (0, 1) for c in (True, False)]
            message = FromPrefill(recheck=RecheckResult(attempt=attempt, blocks=blocks_found))
        else:
            message = FromPrefill(done=JobDone(attempt=attempt)) if kind == "done" else FromPrefill()
        self.out.say(peer, message)

    # -- the engine -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.out.main)
    @rule(count=st.integers(1, 4))
    def compute(self, count: int) -> None:
        for _ in range(min(count, len(self.out.main))):
            self.out.compute()

    @precondition(lambda self: self.out.reads)
    @rule(data=st.data(), how=st.sampled_from(["done", "failed", "torn"]))
    def end_a_read(self, data: st.DataObject, how: str) -> None:
        """In any order; also one that was given up, whose peer is gone, or with other bytes than were offered."""
        read_id = data.draw(st.sampled_from(sorted(self.out.reads)))
        if how == "done":
            self.out.bring(read_id)
            return
        read = self.out.reads.pop(read_id)
        self.out.engine.slots[read.slot] = []
        self.out.report(ReadFailed(read.id, "failed") if how == "failed" else ReadDone(read.id, 0.0))

    @precondition(lambda self: self.out.adding)
    @rule(good=st.booleans())
    def warm_a_link(self, good: bool) -> None:
        self.out.warm(good)

    @rule(report=illegal_reports)
    def report_what_was_never_asked(self, report: Report) -> None:
        before = self.books()
        with pytest.raises(IntegrityError):
            self.out.core.from_engine(report, self.out.now)
        assert self.out.core.take_effects() == []
        assert self.books() == before

    def rot(self) -> None:
        """Bytes of all blocks that nobody owns change: whoever matches one must notice."""
        self.out.rotted, books = True, self.out.core.state.books
        if not self.out.main:  # else a row in flight may still read what it is about
            for block in range(books.num_blocks):
                if books.is_published(block) and not books._owners[block]:
                    self.out.engine.blocks[block] = EMPTY

    # -- time -----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.3, 2.5, 6.0]))
    def tick(self, seconds: float) -> None:
        while self.out.main and self.out.now + seconds - self.out.main[0].at > PATIENCE_S:
            self.out.compute()
        self.out.pass_time(seconds)

    @rule(seconds=st.floats(1, 100))
    def sleep(self, seconds: float) -> None:
        self.out.now += seconds
        for told in self.out.main:
            told.at += seconds
        self.out.closed_at = {router: at + seconds for router, at in self.out.closed_at.items()}
        self.out.core.slept(seconds)

    @rule(at_once=st.booleans(), really=st.sampled_from([False] * 9 + [True]))
    def drain(self, at_once: bool, really: bool) -> None:
        if really:
            self.out.core.drain(self.out.now)
            self.out.settle()
            self.drained = True
            if at_once:
                self.out.core.hand_over(self.out.now)
                self.out.settle()
                assert not self.out.core.state.attempts

    # -- what always holds ----------------------------------------------------------------------------------------

    def books(self) -> dict[str, object]:
        """What an illegal move may not change."""
        state = self.out.core.state
        attempts = {a.id: (a.phase, [list(s.emitted) for s in a.samples]) for a in state.attempts.values()}
        free = [state.books.generation(b) for b in range(state.books.num_blocks)]
        gauges = dict(self.out.core.status().gauges)
        return {"attempts": attempts, "generations": free, "gauges": gauges, "plan": state.batcher.plan}

    @invariant()
    def audit(self) -> None:
        core = self.out.core
        core.check_integrity()
        for attempt in core.state.attempts:
            ask = self.out.asks[attempt]
            assert not ask.over, f"{attempt} still runs after {ask.over}"
            left = self.out.closed_at.get(ask.router, self.out.ticked_at)
            assert self.out.ticked_at - left <= RESUME_S, "its router did not come back in time"
        gauges = core.status().gauges
        steps = sum(isinstance(told.command, Step) for told in self.out.main)
        assert steps == core.state.batcher.in_flight
        slots = gauges["slots_in_use"] + gauges["slots_set_aside"]
        assert slots == len(self.out.busy_slots()), "slots and reads do not add up"
        if not core.state.attempts and not steps and not any(isinstance(told.command, Copy) for told in self.out.main):
            assert gauges["blocks_in_use"] == 0, "blocks without an owner"
        assert not self.drained or not any(a.phase is Phase.WAITING for a in core.state.attempts.values())

    def teardown(self) -> None:
        """Every peer leaves, the engine goes on: each attempt comes to its end, and then nothing is held."""
        if not hasattr(self, "out"):
            return
        out = self.out
        for router in ROUTERS:
            out.open_session(router)
        for _ in range(400):
            for peer in list(out.links):
                out.close_link(peer)
            while out.reads:
                out.report(ReadFailed(out.reads.popitem()[0], "gone"))
            out.adding.clear()
            while out.main:
                out.compute()
            out.now += 0.01
            out.core.peers.members([])
            out.core.tick(out.now)
            out.settle()
            if not (out.core.state.attempts or out.main or out.reads or out.links):
                break
        self.audit()
        held = {name: value for name, value in out.core.status().gauges.items() if value}
        assert not held, f"still held: {held}"
        unended = [a for a, ask in out.asks.items() if ask.live]
        assert not unended, f"{unended} had no outcome"


TestDecodeWorker = quick(DecodeWorker, examples=60, steps=50)
TestDecodeWorkerLong = long(DecodeWorker, examples=400, steps=60)
