"""Everything around one DecodeCore, with books of its own: routers, links, prefill workers, an engine.

Nothing happens by itself. A machine says what happens next; what the core then wants is compared with these books.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.stubs.common_pb2 import Blame, Sampling
from cluster.stubs.link_pb2 import (
    FromDecodePeer,
    FromPrefill,
    JobAccepted,
    RecheckedBlock,
    RecheckResult,
)
from cluster.stubs.session_pb2 import (
    AttemptSettled,
    FromDecode,
    FromRouter,
    ResumeAttempt,
    RouterHello,
    SampleState,
    Submit,
    TokenRun,
)
from decode_worker.core import DecodeCore
from decode_worker.effects import Dial, Effect, HangUp, ToEngine, ToPrefill, ToRouter
from decode_worker.state import Facts
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    CopyDone,
    Digest,
    DigestDone,
    DropPeer,
    PeerAdded,
    PeerFailed,
    Poison,
    Read,
    ReadDone,
    Report,
    Step,
)
from tests.unit.machines.holder import Holder
from tests.unit.machines.paper import (
    EOS,
    LAYOUT,
    MAX_CONTEXT,
    VOCABULARY,
    PaperEngine,
    answer,
    config,
    identity,
)

FINAL = ("refused", "failed", "no_prefill", "preempted", "unknown")
EPOCHS = {"r0": 1, "r1": 2}
BLAMES = {"failed": Blame.BLAME_WORKER, "invalid": Blame.BLAME_REQUEST, "could not run": Blame.BLAME_UNSETTLED}
STOPPED = -1


@dataclass(frozen=True)
class Wish:
    """A request to be made. `known`: how many tokens of each sample an earlier attempt has delivered."""

    session: int
    prompt: list[int]
    known: tuple[int, ...]
    max_tokens: int
    seed: int
    prefill: str
    local: int
    tenant: bytes
    preemptions: int
    stops: Sequence[int]
    deadline: float
    waited: float


@dataclass
class Ask:
    """One attempt as its router sees it."""

    router: str
    submit: Submit
    truths: list[list[int]]
    got: list[list[int]]
    ended: set[int]
    deadline: float
    over: str = ""  # how it ended before its samples did
    invalid: bool = False  # a holder has called it so
    stopped: set[int] = field(default_factory=set)

    @property
    def live(self) -> bool:
        return not self.over and len(self.ended | self.stopped) < len(self.got)

    def offsets(self) -> list[int]:
        """How far its router is, per sample."""
        over = self.ended | self.stopped
        return [STOPPED if i in over else len(got) for i, got in enumerate(self.got)]


@dataclass
class Told:
    """What the engine was told and has not done. `truths`: what the rows of a step must find."""

    command: Command
    truths: list[list[int]]
    at: float


class Outside:
    """The core, and what everybody around it knows."""

    def __init__(self, blocks: int, wait_line: int) -> None:
        settings = config(blocks, wait_line=wait_line)
        facts = Facts(identity("decode", "decode"), LAYOUT, VOCABULARY, MAX_CONTEXT, EOS)
        self.core = DecodeCore(settings, facts)
        self.now = self.ticked_at = 100.0
        self.rotted = False
        self.engine = PaperEngine(blocks)
        self.main: deque[Told] = deque()
        self.reads: dict[int, Read] = {}
        self.adding: list[AddPeer] = []
        self.sessions: dict[str, str] = {}  # router -> the session that it speaks on
        self.closed_at: dict[str, float] = {}
        self.numbers = 0
        self.knows: list[tuple[str, str]] = []  # (router, attempt) of ends that routers have read
        self.asks: dict[str, Ask] = {}
        self.holders = {holder.peer: holder for holder in (Holder("p0"), Holder("p1"))}
        self.links: dict[str, str] = {}
        self.torn = False  # reads bring other bytes than were offered

    # -- routers --------------------------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> None:
        """A request that can be served, unless its history leaves nothing to be done."""
        if not self.sessions:
            return
        open_now = sorted(self.sessions)
        router, attempt = open_now[wish.session % len(open_now)], f"a{len(self.asks) + 1}"
        seeds = [(i, wish.seed) for i in range(len(wish.known))]
        truths = [answer(wish.prompt, i, seed, wish.max_tokens, wish.stops) for i, seed in seeds]
        got = [truth[:known] for truth, known in zip(truths, wish.known, strict=True)]
        ended = {i for i, truth in enumerate(truths) if len(got[i]) == len(truth)}
        if len(ended) == len(truths):
            return
        submit = Submit(
            attempt=attempt,
            prompt=wish.prompt,
            samples=[SampleState(emitted=known, finished=i in ended) for i, known in enumerate(got)],
            max_tokens=wish.max_tokens,
            sampling=Sampling(top_p=1.0, logprobs=-1, seed=wish.seed),
            stop_token_ids=wish.stops,
            salt=wish.tenant,
            prefill=[h.address for name in wish.prefill.split() for h in self.holders.values() if h.name == name],
            local_max_tokens=wish.local,
            deadline_s=wish.deadline,
            preemptions=wish.preemptions,
            waited_s=wish.waited,
        )
        self.asks[attempt] = Ask(router, submit, truths, got, ended, self.now + wish.deadline)
        self.tell(router, FromRouter(submit=submit))

    def tell(self, router: str, message: FromRouter) -> None:
        if router in self.sessions:
            self.core.from_router(self.sessions[router], message, self.now)
            self.settle()

    def open_session(self, router: str, dropped: str = "") -> None:
        """A first session, or a newer one, which asks for what is missing of all attempts but `dropped`."""
        self.numbers += 1
        session = f"{router} {self.numbers}"
        live = {name: ask for name, ask in self.asks.items() if ask.router == router and ask.live}
        if dropped in live:
            live.pop(dropped).over = "cancelled"
        wanted = [ResumeAttempt(attempt=name, next_offsets=ask.offsets()) for name, ask in live.items()]
        hello = RouterHello(epoch=EPOCHS[router], session=self.numbers, attempts=wanted)
        self.sessions[router] = session
        assert self.core.session_opened(session, hello, self.now)
        self.closed_at.pop(router, None)
        self.settle()
        stale = RouterHello(epoch=EPOCHS[router], session=self.numbers)
        assert not self.core.session_opened("an older one", stale, self.now)
        assert not self.core.take_effects()

    def close_session(self, router: str) -> None:
        """Its attempts run on for a while: it may come back for what they write."""
        self.closed_at[router] = self.now
        self.core.session_closed(self.sessions.pop(router), self.now)
        self.settle()

    def _hear(self, session: str, message: FromDecode) -> None:
        assert session in self.sessions.values(), "sent on a session that is closed"
        router = session.split()[0]
        kind = message.WhichOneof("message")
        if kind == "tokens":
            for run in message.tokens.runs:
                self._hear_run(router, run)
        elif kind != "hello":
            word = getattr(message, kind or "")
            ask = self.asks.get(word.attempt)
            assert ask is not None, f"{kind} about nobody"
            assert ask.router == router, "another router's attempt"
            assert ask.live, f"{kind} after the end"
            if kind in FINAL:
                ask.over = kind
                self.knows.append((router, word.attempt))
            assert kind != "refused" or not word.permanent, f"what fits was refused for good: {word.reason}"
            if kind == "failed":
                late = word.blame == Blame.BLAME_DEADLINE and self.now > ask.deadline
                rot = self.rotted and word.reason.endswith("failed its check")
                assert late or ask.invalid or rot, f"failed without cause: {word.reason}"

    def _hear_run(self, router: str, run: TokenRun) -> None:
        ask = self.asks[run.attempt]
        assert ask.router == router, "tokens for another router"
        if ask.over == "cancelled":  # they were on their way
            return
        assert not ask.over, f"tokens after {ask.over}"
        got, truth = ask.got[run.index], ask.truths[run.index]
        assert run.index not in ask.ended, "tokens after the end of a sample"
        assert run.offset == len(got), f"offset {run.offset} after {len(got)} tokens"
        got += run.ids
        assert got == truth[: len(got)], f"{got} is not {truth}"
        assert run.index in ask.stopped or bool(run.end) == (len(got) == len(truth)), (
            f"{run.end!r} at {len(got)} of {len(truth)}"
        )
        if run.end:
            ask.ended.add(run.index)
        if not ask.live:
            self.knows.append((router, run.attempt))

    # -- engine ---------------------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        self.core.from_engine(report, self.now)
        self.settle()

    def compute(self) -> None:
        """The engine does the next thing it was told."""
        told = self.main.popleft()
        command, truths = told.command, told.truths
        match command:
            case Step():
                self.report(self.engine.step(command, truths))
            case Copy():
                self.report(CopyDone(command.id, self.engine.copy(command), 0.0))
            case Digest():
                self.report(DigestDone(command.id, self.engine.digest(command.blocks)))
            case Poison():
                self.engine.poison(command.blocks)

    def _command(self, command: Command) -> None:
        match command:
            case Read():
                assert command.id not in self.reads
                assert command.slot not in self.busy_slots(), "a slot in use"
                self.reads[command.id] = command
            case AddPeer():
                self.adding.append(command)
            case DropPeer():
                pass
            case _:
                truths = []
                if isinstance(command, Step):
                    known = self.core.state.batcher.sequences
                    ends = [(known[row.sequence], row.start + len(row.tokens or [])) for row in command.rows]
                    truths = [sequence.tokens[:end] for sequence, end in ends]
                self.main.append(Told(command, truths, self.now))

    def busy_slots(self) -> set[int]:
        copies = {told.command.slot for told in self.main if isinstance(told.command, Copy)}
        return copies | {read.slot for read in self.reads.values()}

    # -- links ----------------------------------------------------------------------------------------------------

    def say(self, peer: str, message: FromPrefill) -> None:
        self.core.from_prefill(peer, message, self.now)
        self.settle()

    def accept(self, peer: str, attempt: str) -> None:
        self.say(peer, FromPrefill(accepted=JobAccepted(attempt=attempt, eta_s=0.1)))

    def close_link(self, peer: str) -> None:
        self._forget_link(peer)
        self.core.link_closed(peer, "closed", self.now)
        self.settle()

    def _forget_link(self, peer: str) -> None:
        self.links.pop(peer, None)
        self.holders[peer].works.clear()
        self.holders[peer].rechecks.clear()

    def _to_prefill(self, peer: str, message: FromDecodePeer) -> None:
        assert self.links.get(peer) == "up", f"sent on a link that is {self.links.get(peer)}"
        holder = self.holders[peer]
        match message.WhichOneof("message"):
            case "job":
                ask = self.asks[message.job.attempt]
                history = ask.got[0] if len(ask.got) == 1 else []
                wanted = [*ask.submit.prompt, *history]
                assert list(message.job.tokens)[: len(ask.submit.prompt)] == wanted[: len(ask.submit.prompt)]
                holder.take(message.job)
            case "cancel":
                holder.works.pop(message.cancel.attempt, None)
            case "taken":
                holder.works.pop(message.taken.attempt, None)
            case "recheck":
                holder.rechecks.append(message.recheck)

    # -- together -------------------------------------------------------------------------------------------------

    def honest_moves(self) -> list[Callable[[], None]]:
        """Everything that an honest and healthy neighbour could do next."""
        moves: list[Callable[[], None]] = []
        moves += [partial(self.greet, peer) for peer, link in self.links.items() if link == "dialled"]
        moves += [partial(self.warm, True)] if self.adding else []
        moves += [partial(self.bring, read) for read in self.reads]
        moves += [self.compute] if self.main else []
        for peer, holder in self.holders.items():
            moves += [partial(self.work, peer, attempt, 2) for attempt, work in holder.works.items() if not work.done]
            moves += [partial(self.answer_recheck, peer, True)] if holder.rechecks else []
        return moves or [partial(self.pass_time, 0.01)]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ticked_at = self.now
        self.core.tick(self.now)
        self.settle()

    def greet(self, peer: str) -> None:
        self.links[peer] = "up"
        self.core.link_opened(peer, self.holders[peer].hello(), self.now)
        self.settle()

    def warm(self, good: bool) -> None:
        peer = self.adding.pop(0).peer
        self.report(PeerAdded(peer, False, 1.0) if good else PeerFailed(peer, "unreachable"))

    def bring(self, read_id: int) -> None:
        """A read ends with what is in its holder's memory now."""
        read = self.reads.pop(read_id)
        self.engine.slots[read.slot] = [] if self.torn else self.holders[read.peer].bytes_at(read.ranges)
        self.report(ReadDone(read.id, 0.0))

    def work(self, peer: str, attempt: str, count: int) -> None:
        self.say(peer, self.holders[peer].next_word(attempt, count))

    def answer_recheck(self, peer: str, current: bool) -> None:
        recheck = self.holders[peer].rechecks.pop(0)
        blocks = [RecheckedBlock(block=b.block, generation=b.generation, current=current) for b in recheck.blocks]
        self.say(peer, FromPrefill(recheck=RecheckResult(attempt=recheck.attempt, blocks=blocks)))

    # -- effects --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what the core wants, as far as it goes without anybody else."""
        for effect in self.core.take_effects():
            self._carry(effect)
        known, self.knows = self.knows, []
        for router, attempt in known:
            self.tell(router, FromRouter(ended=AttemptSettled(attempt=attempt)))

    def _carry(self, effect: Effect) -> None:
        match effect:
            case ToEngine(command):
                self._command(command)
            case ToRouter(session, message):
                self._hear(session, message)
            case ToPrefill(peer, to_peer):
                self._to_prefill(peer, to_peer)
            case Dial(peer, _):
                assert peer not in self.links, "dialled twice"
                self.links[peer] = "dialled"
            case HangUp(peer):
                self._forget_link(peer)
            case _:
                raise AssertionError(f"the worker gave up: {effect}")
