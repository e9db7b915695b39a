"""A scripted decode worker and a world around one dispatcher core: in-process, on a clock that the test moves."""

import random
from collections import deque
from dataclasses import dataclass, field

from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import HeadraceError
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.watch_pb2 import Snapshot, Status, WatchEvent, WatchHello
from router.dispatcher import DispatcherCore
from router.effects import (
    CloseSession,
    CloseWatch,
    Deliver,
    Effect,
    Finished,
    OpenSession,
    OpenWatch,
    ReopenSession,
    ReopenWatch,
    SendSession,
    StreamClosed,
    StreamOpened,
)
from router.requests import Request, TokenEvent, Trace
from router.workers import PROTOCOL

BLOCK = 4


def token(prompt: list[int], seed: int, index: int, position: int) -> int:
    """What any worker draws at `position` of sample `index`: a function of the request alone."""
    return (sum(prompt) * 31 + seed * 17 + index * 7 + position * 13) % 1009


def length(prompt: list[int], index: int, max_tokens: int) -> int:
    """How many tokens sample `index` has before it ends."""
    return 1 + (sum(prompt) + 5 * index) % max_tokens


def expected(request: Request, index: int) -> list[int]:
    """All tokens of one sample of a request."""
    prompt = list(request.prompt)
    count = length(prompt, index, request.max_tokens)
    return [token(prompt, request.sampling.seed, index, at) for at in range(count)]


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, n: int = 1, **more: float) -> Request:
    return Request(name, f"public-{name}", prompt, max_tokens, n, deadline_s=more.get("deadline_s", 600.0))


@dataclass(slots=True)
class Faults:
    """Chances per message or step."""

    refuse: float = 0.0
    no_prefill: float = 0.0
    preempt: float = 0.0
    fail: float = 0.0
    die: float = 0.0
    repeat: float = 0.0
    gap: float = 0.0
    late: float = 0.0
    hang_up: float = 0.0


@dataclass(slots=True)
class Work:
    """One attempt on a fake decode worker."""

    submit: pb.Submit
    emitted: list[int]
    finished: list[bool]


@dataclass(slots=True)
class FakeWorker:
    """Either role. A decode worker answers Submit with `token`; `Faults` says how badly it behaves."""

    name: str
    role: str
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=Faults)
    epoch: int = 1
    blocks: int = 64
    fingerprint: bytes = b"weights"
    max_context: int = 256
    queued_tokens: int = 0
    up: bool = True
    works: dict[str, Work] = field(default_factory=dict)
    gone: list[pb.Submit] = field(default_factory=list)  # ended attempts, of which something may still come late
    received: list[pb.FromRouter] = field(default_factory=list)
    out: deque[pb.FromDecode] = field(default_factory=deque)

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    def identity(self) -> WorkerIdentity:
        layout = Layout(layers=2, kv_heads=2, head_dim=8, block_size=BLOCK, dtype="float32")
        return WorkerIdentity(
            worker=self.name,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            layout=layout,
            fingerprint=self.fingerprint,
            protocol=PROTOCOL,
        )

    def free(self) -> int:
        return self.blocks - sum(self._held(work) for work in self.works.values())

    def hello(self, keys: bytes = b"") -> list[WatchEvent]:
        """What a new watch stream begins with."""
        hello = WatchHello(
            identity=self.identity(),
            vocab_size=1009,
            max_context=self.max_context,
            eos_ids=[2],
            num_blocks=self.blocks,
            block_size=BLOCK,
        )
        return [
            WatchEvent(sequence=1, hello=hello),
            WatchEvent(sequence=2, snapshot=Snapshot(keys=keys)),
            WatchEvent(sequence=3, status=self.status()),
        ]

    def status(self) -> Status:
        return Status(ready=True, free_blocks=self.free(), running=len(self.works), queued_tokens=self.queued_tokens)

    def take(self, message: pb.FromRouter) -> None:
        """One message from the router."""
        self.received.append(message)
        match message.WhichOneof("message"):
            case "hello":
                self.out.append(pb.FromDecode(hello=self.identity()))
            case "submit":
                self._on_submit(message.submit)
            case "cancel":
                self._forget(message.cancel.attempt)
            case "stop_seq":
                work = self.works.get(message.stop_seq.attempt)
                if work is not None:
                    work.finished[message.stop_seq.index] = True
            case "ended":
                self._forget(message.ended.attempt)

    def step(self) -> None:
        """Every attempt goes on by a few tokens, or meets its fate."""
        for work in list(self.works.values()):
            attempt = work.submit.attempt
            if self._happens(self.faults.preempt):
                self.out.append(pb.FromDecode(preempted=pb.Preempted(attempt=attempt)))
                self._forget(attempt)
            elif self._happens(self.faults.fail):
                self.out.append(pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt, reason="a fault")))
                self._forget(attempt)
            else:
                self._emit(work)
        if self.gone and self._happens(self.faults.late):
            submit = self.rng.choice(self.gone)
            run = pb.TokenRun(attempt=submit.attempt, index=0, offset=0, ids=[999_999], end="eos")
            self.out.append(pb.FromDecode(tokens=pb.Tokens(runs=[run])))

    def restart(self) -> None:
        """A new process on the same address, with nothing of the old one."""
        self.epoch += 1
        self.works.clear()
        self.gone.clear()
        self.out.clear()
        self.up = True

    def _on_submit(self, submit: pb.Submit) -> None:
        prompt = list(submit.prompt)
        for index, sample in enumerate(submit.samples):
            drawn = [token(prompt, submit.sampling.seed, index, at) for at in range(len(sample.emitted))]
            assert list(sample.emitted) == drawn, "history that was never drawn"
        assert submit.attempt not in self.works
        work = Work(submit, [len(s.emitted) for s in submit.samples], [s.finished for s in submit.samples])
        if self._happens(self.faults.refuse) or self._held(work) > self.free():
            refused = pb.AttemptRefused(attempt=submit.attempt, reason="full", free_blocks=self.free())
            self.out.append(pb.FromDecode(refused=refused))
        elif submit.prefill and self._happens(self.faults.no_prefill):
            self.out.append(pb.FromDecode(no_prefill=pb.NoPrefill(attempt=submit.attempt, reason="busy")))
        else:
            self.works[submit.attempt] = work
            where = submit.prefill[0].worker if submit.prefill else "local"
            self.out.append(pb.FromDecode(prefill_on=pb.PrefillOn(attempt=submit.attempt, worker=where)))

    def _emit(self, work: Work) -> None:
        submit = work.submit
        prompt = list(submit.prompt)
        runs = []
        for index, known in enumerate(work.emitted):
            if work.finished[index]:
                continue
            total = length(prompt, index, submit.max_tokens)
            until = min(total, known + self.rng.randint(1, 3))
            start = self.rng.randint(0, known) if self._happens(self.faults.repeat) else known
            if self._happens(self.faults.gap) and known + 1 < until:
                start = known + 1
            ids = [token(prompt, submit.sampling.seed, index, at) for at in range(start, until)]
            work.emitted[index] = until
            work.finished[index] = until == total
            end = "" if until < total else "length"
            runs.append(pb.TokenRun(attempt=submit.attempt, index=index, offset=start, ids=ids, end=end))
        if runs:
            self.out.append(pb.FromDecode(tokens=pb.Tokens(runs=runs)))

    def _held(self, work: Work) -> int:
        samples = len(work.emitted)
        return -(-len(work.submit.prompt) // BLOCK) + samples * -(-work.submit.max_tokens // BLOCK)

    def _forget(self, attempt: str) -> None:
        work = self.works.pop(attempt, None)
        if work is not None:
            self.gone.append(work.submit)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


@dataclass(slots=True)
class Client:
    """What one client got."""

    request: Request
    trace: Trace
    ids: list[list[int]]
    ends: list[str | None]
    stopped: set[int] = field(default_factory=set)
    outcomes: list[HeadraceError | None] = field(default_factory=list)
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return self.cancelled or bool(self.outcomes)

    def take(self, event: TokenEvent) -> None:
        assert not self.over, "an event after the end"
        assert self.ends[event.index] is None, "an event after a sample's end"
        self.ids[event.index].extend(event.ids)
        self.ends[event.index] = event.end


class World:
    """One core and its workers. Every effect is carried out at once; messages of workers wait until `deliver`."""

    def __init__(self, workers: list[FakeWorker], seed: int = 0, **settings: int) -> None:
        self.now = 100.0
        self.core = DispatcherCore(RouterSettings(**settings), TimingSettings(), 77, random.Random(seed))
        self.workers = {worker.address: worker for worker in workers}
        self.watching: dict[str, int] = {}  # address -> next sequence
        self.sessions: set[str] = set()
        self.wanted_sessions: set[str] = set()
        self.clients: dict[str, Client] = {}
        self.apply(self.core.set_members(list(self.workers), self.now))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendSession(address, message):
                    assert address in self.sessions, "sent without a session"
                    self.workers[address].take(message)
                case Deliver(request_id, event):
                    self.clients[request_id].take(event)
                case Finished(request_id, error):
                    self.clients[request_id].outcomes.append(error)
                case OpenWatch(address) | ReopenWatch(address):
                    self.watching.pop(address, None)
                case CloseWatch(address):
                    self.watching.pop(address, None)
                    del self.workers[address]
                case OpenSession(address) | ReopenSession(address):
                    self.wanted_sessions.add(address)
                    self.sessions.discard(address)
                case CloseSession(address):
                    self.wanted_sessions.discard(address)
                    self.sessions.discard(address)
        self.core.check_integrity()

    def connect(self) -> None:
        """Streams that are wanted come up where a worker is up."""
        for address, worker in list(self.workers.items()):
            if worker.up and address not in self.watching:
                self.watching[address] = 4
                for event in worker.hello():
                    self.apply(self.core.on_watch(address, event, self.now))
            if worker.up and address in self.wanted_sessions - self.sessions:
                self.sessions.add(address)
                self.apply(self.core.on_session(address, StreamOpened(), self.now))
        self.deliver()

    def deliver(self) -> None:
        """What workers said arrives, in order."""
        for address, worker in list(self.workers.items()):
            while worker.out and address in self.sessions:
                self.apply(self.core.on_session(address, worker.out.popleft(), self.now))

    def heartbeat(self) -> None:
        for address, sequence in list(self.watching.items()):
            if self.workers[address].up:
                self.watching[address] = sequence + 1
                event = WatchEvent(sequence=sequence, status=self.workers[address].status())
                self.apply(self.core.on_watch(address, event, self.now))

    def hang_up(self, address: str) -> None:
        """The session breaks; the worker lives."""
        if address in self.sessions:
            self.sessions.discard(address)
            self.workers[address].out.clear()
            self.apply(self.core.on_session(address, StreamClosed("hung up"), self.now))

    def close_watch(self, address: str) -> None:
        """The watch breaks; nothing else does."""
        if self.watching.pop(address, None) is not None:
            self.apply(self.core.on_watch(address, StreamClosed("closed"), self.now))

    def die(self, address: str) -> None:
        """The process is gone: both streams close."""
        self.workers[address].up = False
        self.hang_up(address)
        self.close_watch(address)

    def ask(self, request: Request) -> Client:
        trace = Trace()
        client = Client(request, trace, [[] for _ in range(request.n)], [None] * request.n)
        self.clients[request.request_id] = client
        self.apply(self.core.add_request(request, self.now, trace))
        return client

    def cancel(self, name: str) -> None:
        client = self.clients[name]
        if not client.over:
            self.apply(self.core.cancel(name, self.now))
            client.cancelled = True

    def stop(self, name: str, index: int) -> None:
        client = self.clients[name]
        if not client.over:
            client.stopped.add(index)
            self.apply(self.core.stop(name, index, self.now))

    def advance(self, seconds: float = 0.25) -> None:
        """Time passes: workers step, heartbeats come, the core ticks."""
        self.now += seconds
        self.connect()
        for worker in self.workers.values():
            if worker.up:
                worker.step()
        self.deliver()
        self.heartbeat()
        self.apply(self.core.tick(self.now))
        self.deliver()

    def run(self, steps: int = 200) -> None:
        """Until every client has its outcome."""
        for _ in range(steps):
            if all(client.over for client in self.clients.values()):
                return
            self.advance()

    def idle(self) -> bool:
        """Whether neither the router nor any worker holds anything."""
        running = any(worker.works for worker in self.workers.values())
        return not running and not any(self.core.gauges().values())
