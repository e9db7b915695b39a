"""The two ends of the watch together: what a worker publishes, and what routers believe of its cache (FAULTS S02).

Streams deliver in pieces, stand still, are dropped when their queue is full, break and are opened again. No event is
lost on a stream that was not dropped, and a router that has read everything believes what is true.
"""

import asyncio
import logging
from collections import deque
from typing import NoReturn

import grpc
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.stubs.watch_pb2 import Status, WatchEvent, WatchHello, WatchRequest
from cluster.watch import BATCH_S, QUEUE_EVENTS, WatchPublisher
from router.prefix_index import PrefixIndex
from router.workers import WorkerView
from tests.stateful import long, quick
from tests.unit.machines.virtual import VirtualLoop
from tests.unit.router_core.fakes import FakeWorker, believed

HEARTBEAT_S = 5.0
ROUTERS = st.integers(0, 1)
keys = st.sets(st.integers(0, 3), max_size=2)  # few, so that one comes and goes within a batch
KEYS = [bytes([key]) * 16 for key in range(4)]


class Dropped(Exception):
    """What `abort` raises."""


class Stream:
    """One router's stream: it takes what is written while it may, and the router reads it when it likes."""

    def __init__(self, loop: VirtualLoop, publisher: WatchPublisher) -> None:
        self.flows = asyncio.Event()
        self.flows.set()
        self.arrived: deque[WatchEvent] = deque()
        self.view = WorkerView("d:1", PrefixIndex(100), 0.5)
        self.task = loop.create_task(publisher.Open(WatchRequest(), self))  # type: ignore[arg-type]

    def peer(self) -> str:
        return "a router"

    async def write(self, event: WatchEvent) -> None:
        await self.flows.wait()
        self.arrived.append(event)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Dropped(details)

    def read(self) -> None:
        while self.arrived:
            assert self.view.on_watch(self.arrived.popleft(), 0.0), "a gap on a stream that was not dropped"


class Watch(RuleBasedStateMachine):
    """One worker, two routers."""

    @initialize()
    def begin(self) -> None:
        logging.getLogger("cluster.watch").setLevel(logging.ERROR)
        self.loop = VirtualLoop()
        self.truth: set[bytes] = set()
        self.status = Status(ready=True)
        fake = FakeWorker("d", "decode")
        hello = WatchHello(identity=fake.identity(), num_blocks=9, block_size=4)
        self.publisher = WatchPublisher(
            hello, lambda: sorted(self.truth), lambda: self.status, heartbeat_s=HEARTBEAT_S, most=2
        )
        self.running = self.loop.create_task(self.publisher.run())
        self.streams: dict[int, Stream] = {}
        self.open(0)

    @rule(router=ROUTERS)
    def open(self, router: int) -> None:
        if router not in self.streams:
            self.streams[router] = Stream(self.loop, self.publisher)
            self.loop.let_pass(0.0)

    @rule(router=ROUTERS)
    def close(self, router: int) -> None:
        stream = self.streams.pop(router, None)
        if stream is not None:
            stream.task.cancel()
            self.loop.let_pass(0.0)

    @rule(router=ROUTERS, flows=st.booleans())
    def stall(self, router: int, flows: bool) -> None:
        if router in self.streams:
            gate = self.streams[router].flows
            gate.set() if flows else gate.clear()
            self.loop.let_pass(0.0)

    @rule(router=ROUTERS)
    def read(self, router: int) -> None:
        if router in self.streams:
            self.streams[router].read()

    @rule(stored=keys, removed=keys)
    def cache_changes(self, stored: set[int], removed: set[int]) -> None:
        """As the cores do it: a block leaves before another comes in."""
        gone = {bytes([key]) * 16 for key in removed} & self.truth
        self.truth -= gone
        come = {bytes([key]) * 16 for key in stored} - self.truth
        self.truth |= come
        self.loop.run(self.publish(gone, come))

    async def publish(self, removed: set[bytes], stored: set[bytes]) -> None:
        self.publisher.publish_removed(removed)
        self.publisher.publish_stored(stored)

    @rule(draining=st.booleans())
    def status_changes(self, draining: bool) -> None:
        self.status = Status(ready=True, draining=draining)
        self.publisher.publish_status()
        self.loop.let_pass(0.0)

    @rule(times=st.sampled_from([1, 300]))
    def many_statuses(self, times: int) -> None:
        """A router that does not read loses its stream, and no other one does."""
        flowing = [r for r, stream in self.streams.items() if stream.flows.is_set()]
        for _ in range(times):
            self.publisher.publish_status()
            self.loop.let_pass(0.0)
        for router, stream in list(self.streams.items()):
            if stream.task.done():
                assert router not in flowing
                assert isinstance(stream.task.exception(), Dropped)
                del self.streams[router]
        assert times < QUEUE_EVENTS or set(self.streams) == set(flowing)

    @rule(seconds=st.sampled_from([BATCH_S / 2, BATCH_S, HEARTBEAT_S]))
    def wait(self, seconds: float) -> None:
        self.loop.let_pass(seconds)
        for stream in self.streams.values():
            if stream.flows.is_set() and not stream.task.done() and seconds >= BATCH_S:
                stream.read()
                assert believed(stream.view, KEYS) == self.truth, "a change was not told within a batch"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "publisher"):
            return
        assert not self.running.done()
        assert self.publisher.subscribers == len([s for s in self.streams.values() if not s.task.done()])

    def teardown(self) -> None:
        """All read again: every router that is connected believes the truth."""
        if not hasattr(self, "publisher"):
            return
        for stream in self.streams.values():
            stream.flows.set()
        self.loop.let_pass(2 * BATCH_S)
        for stream in self.streams.values():
            stream.read()
            assert believed(stream.view, KEYS) == self.truth
            assert stream.view.status == self.status
        self.running.cancel()
        self.loop.let_pass(0.0)
        assert all(stream.task.done() for stream in self.streams.values()), "a stream outlives its worker"
        assert self.publisher.subscribers == 0
        self.loop.stop_all()


TestWatch = quick(Watch, examples=40, steps=25)
TestWatchLong = long(Watch, examples=500, steps=60)
