"""The modelled cluster: workers, routers, and the streams between them, on one loop."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.modelled.decode import LATENCY_S, ModelledDecode
from benchmarks.modelled.hardware import H100_NODE, Hardware
from benchmarks.modelled.prefill import ModelledPrefill
from benchmarks.modelled.traces import SCALE
from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.keys import BlockKey
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import WatchEvent
from router.dispatcher import DispatcherCore
from router.effects import Deliver, Effect, Finished, OpenSession, OpenWatch, ReopenWatch, SendSession, StreamOpened
from router.requests import Request, Trace
from simulation.loop import Loop

TICK_S = 0.25
NODE = H100_NODE.scaled(SCALE)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of. `window`: admission window of a prefill worker in positions; 0: it takes all."""

    prefill: int = 8
    decode: int = 8
    routers: int = 1
    window: int = 0
    hardware: Hardware = NODE


Lookup = Callable[[str], tuple[list[BlockKey], int]]


class ModelledCluster:
    """Everything of one run. Routers are told of all workers at time zero."""

    def __init__(self, shape: Shape, settings: RouterSettings, lookup: Lookup, seed: int) -> None:
        self.loop = Loop(seed)
        self.prefill = {
            name: ModelledPrefill(self.loop, name, 1000 + i, shape.hardware, shape.window)
            for i, name in enumerate(f"p{i}" for i in range(shape.prefill))
        }
        self.decode = {
            name: ModelledDecode(self.loop, name, 2000 + i, shape.hardware, self.prefill, lookup)
            for i, name in enumerate(f"d{i}" for i in range(shape.decode))
        }
        workers: list[ModelledPrefill | ModelledDecode] = [*self.prefill.values(), *self.decode.values()]
        self.workers = {worker.address: worker for worker in workers}
        self.routers = [ModelledRouter(self, f"r{i}", settings) for i in range(shape.routers)]
        for worker in self.workers.values():  # never all at the same moment
            self.loop.after(self.loop.random.random() / 2, worker.publisher.beat)

    def check(self) -> None:
        """Raises IntegrityError when books disagree, AssertionError when something is left in use."""
        for router in self.routers:
            router.core.check_integrity()
            assert not any(router.core.gauges().values()), router.core.gauges()
        for worker in self.workers.values():
            worker.books.check_integrity()
            assert not worker.books.in_use, f"{worker.name} holds {worker.books.in_use} blocks"


class ModelledRouter:
    """The shell of one router: carries out what its brain decides."""

    def __init__(self, cluster: ModelledCluster, name: str, settings: RouterSettings) -> None:
        self.name = name
        self._cluster = cluster
        self._loop = cluster.loop
        epoch = cluster.loop.random.getrandbits(64) | 1
        self.core = DispatcherCore(settings, TimingSettings(), epoch, random.Random(epoch))
        self.deliver: Callable[[Deliver], None] = lambda _: None
        self.finished: Callable[[Finished], None] = lambda _: None
        self._apply(self.core.set_members(list(cluster.workers), self._loop.now))
        self._tick()

    def ask(self, request: Request, trace: Trace) -> None:
        """A parsed request. Raises Overloaded."""
        self._apply(self.core.add_request(request, self._loop.now, trace))

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.now))
        self._loop.after(TICK_S, self._tick)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendSession(address, message):
                    self._loop.after(LATENCY_S, partial(self._send, address, message))
                case Deliver():
                    self.deliver(effect)
                case Finished():
                    self.finished(effect)
                case OpenWatch(address) | ReopenWatch(address):
                    self._loop.after(0.0, partial(self._watch, address))
                case OpenSession(address):
                    self._loop.after(0.0, partial(self._session, address))
                case _:
                    raise AssertionError(f"nothing here fails, but {effect}")

    def _watch(self, address: str) -> None:
        def hear(event: WatchEvent) -> None:
            self._apply(self.core.on_watch(address, event, self._loop.now))

        self._cluster.workers[address].publisher.subscribe(self.name, hear)

    def _session(self, address: str) -> None:
        self._apply(self.core.on_session(address, StreamOpened(), self._loop.now))

    def _send(self, address: str, message: pb.FromRouter) -> None:
        def say(word: pb.FromDecode) -> None:
            self._loop.after(LATENCY_S, lambda: self._apply(self.core.on_session(address, word, self._loop.now)))

        worker = self._cluster.workers[address]
        assert isinstance(worker, ModelledDecode)
        worker.hear(message, say)
