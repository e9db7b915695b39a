"""A world around one dispatcher core: its workers, its clients, and a clock that the test moves."""

import random
from dataclasses import dataclass, field

from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import HeadraceError
from cluster.scores import Scores
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import WatchEvent
from router.dispatcher import DispatcherCore
from router.effects import (
    CloseSession,
    CloseWatch,
    Deliver,
    DeliverScores,
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
from tests.unit.router_core.fakes import FakeWorker


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
    scored: list[Scores] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.cancelled or bool(self.outcomes)

    def hear(self, scores: Scores) -> None:
        assert not self.over, "an event after the end"
        assert not any(self.ids), "a prompt's log-probabilities after a token"
        self.scored.append(scores)

    def take(self, event: TokenEvent) -> None:
        assert not self.over, "an event after the end"
        assert self.ends[event.index] is None, "an event after a sample's end"
        self.ids[event.index].extend(event.ids)
        self.ends[event.index] = event.end


class World:
    """One core and its workers. Every effect is carried out at once; messages of workers wait until `deliver`."""

    def __init__(
        self, workers: list[FakeWorker], seed: int = 0, /, *, weights: dict[str, float] | None = None, **settings: float
    ) -> None:
        self.now = 100.0
        known = RouterSettings.model_validate(settings)
        self.core = DispatcherCore(known, TimingSettings(), 77, random.Random(seed), weights=weights)
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
                case DeliverScores(request_id, scores):
                    self.clients[request_id].hear(scores)
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
            if address in self.wanted_sessions - self.sessions:
                if worker.up:
                    self.sessions.add(address)
                    self.apply(self.core.on_session(address, StreamOpened(), self.now))
                else:
                    self.apply(self.core.on_session(address, StreamClosed("nobody takes the connection"), self.now))
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

    def advance(self, seconds: float = 0.25, *, connect: bool = True) -> None:
        """Time passes: workers step, heartbeats come, the core ticks."""
        self.now += seconds
        if connect:
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


def world(prefill: int = 1, decode: int = 1, *, weights: dict[str, float] | None = None, **settings: float) -> World:
    workers = [FakeWorker(f"p{i}", "prefill", epoch=1 + 100 * i) for i in range(prefill)]
    workers += [FakeWorker(f"d{i}", "decode", epoch=5001 + 100 * i) for i in range(decode)]
    made = World(workers, 0, weights=weights, **settings)
    made.connect()
    return made


def submits(worker: FakeWorker) -> list[pb.Submit]:
    return [message.submit for message in worker.received if message.HasField("submit")]


def cancels(worker: FakeWorker) -> list[str]:
    return [message.cancel.attempt for message in worker.received if message.HasField("cancel")]


def said(made: World, name: str, message: pb.FromDecode) -> None:
    """A decode worker says something."""
    made.apply(made.core.on_session(f"{name}:1", message, made.now))


def states(made: World) -> dict[str, str]:
    rows = made.core.status(made.now)["workers"]
    assert isinstance(rows, list)
    return {row["address"]: row["state"] for row in rows}


def failure(client: Client) -> str:
    """The message of the one error a client got."""
    assert len(client.outcomes) == 1
    return str(client.outcomes[0])
