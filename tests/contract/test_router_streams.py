"""The router's streams over real gRPC: watch and session, credentials, restarts, gaps, cancels."""

from __future__ import annotations  # grpc's type stubs are generic where its classes are not

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from cluster.core.clock import SystemClock
from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import IntegrityError, Overloaded, RequestFailed, Unavailable
from cluster.core.ids import new_epoch
from cluster.core.protocol import PROTOCOL
from cluster.credentials import Credentials
from cluster.rpc import RpcServer, make_server, service
from cluster.stubs import session_pb2 as pb
from cluster.stubs import session_pb2_grpc, watch_pb2, watch_pb2_grpc
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.watch_pb2 import Snapshot, Status, WatchEvent, WatchHello, WatchRequest
from router.dispatcher import DispatcherCore
from router.requests import Request, Running, TokenEvent
from router.runtime import MAX_HELD_IDS, RouterRuntime

SECRET = "0123456789abcdef"
PATIENCE_S = 10.0


@dataclass
class Heard:
    """Messages a worker got, and the means to wait for one of a kind."""

    messages: list[pb.FromRouter] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, message: pb.FromRouter) -> None:
        async with self.news:
            self.messages.append(message)
            self.news.notify_all()

    async def first(self, matches: Callable[[pb.FromRouter], bool]) -> pb.FromRouter:
        async with asyncio.timeout(PATIENCE_S), self.news:
            while not (found := [m for m in self.messages if matches(m)]):
                await self.news.wait()
        return found[0]


class SmallWorker(watch_pb2_grpc.WatchServicer, session_pb2_grpc.SessionServicer):
    """A decode worker that counts: token i of a request is 100 + i. It stops after `hold` of them."""

    def __init__(self, name: str, *, hold: int | None = None) -> None:
        self.name = name
        self.epoch = new_epoch()
        self.hold = hold
        self.heard = Heard()
        self.watches: list[asyncio.Queue[WatchEvent]] = []
        self.metadata: list[tuple[str, str | bytes]] = []
        self.server: RpcServer | None = None
        self.address = ""
        self.opened = 0
        self.opened_again = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        services = [
            service(watch_pb2.DESCRIPTOR, "Watch", watch_pb2_grpc.add_WatchServicer_to_server, self),
            service(pb.DESCRIPTOR, "Session", session_pb2_grpc.add_SessionServicer_to_server, self),
        ]
        self.server = make_server("127.0.0.1", port, services, Credentials(SECRET))
        await self.server.start()
        self.address = self.server.address

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    def identity(self) -> WorkerIdentity:
        layout = Layout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
        return WorkerIdentity(
            worker=self.name, epoch=self.epoch, role="decode", layout=layout, fingerprint=b"w", protocol=PROTOCOL
        )

    async def Open(  # type: ignore[override]  # one name in both services: told apart by the request
        self, request: WatchRequest | AsyncIterator[pb.FromRouter], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[WatchEvent | pb.FromDecode]:
        self.metadata = list(context.invocation_metadata() or ())
        if isinstance(request, WatchRequest):
            async for event in self._watch():
                yield event
        else:
            async for message in self._session(request):
                yield message

    async def _watch(self) -> AsyncIterator[WatchEvent]:
        self.opened += 1
        if self.opened > 1:
            self.opened_again.set()
        events: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self.watches.append(events)
        hello = WatchHello(
            identity=self.identity(), vocab_size=999, max_context=99_999, eos_ids=[2], num_blocks=9999, block_size=16
        )
        yield WatchEvent(sequence=1, hello=hello)
        yield WatchEvent(sequence=2, snapshot=Snapshot(keys=b"k" * 16))
        yield WatchEvent(sequence=3, status=Status(ready=True, free_blocks=9999))
        while True:
            yield await events.get()

    async def _session(self, incoming: AsyncIterator[pb.FromRouter]) -> AsyncIterator[pb.FromDecode]:
        messages = (each async for message in incoming for each in message.batch or (message,))
        async for message in messages:
            await self.heard.add(message)
            if message.HasField("hello"):
                yield pb.FromDecode(hello=self.identity())
                for resume in message.hello.attempts:  # it keeps nothing of a session that broke
                    yield pb.FromDecode(unknown=pb.UnknownAttempt(attempt=resume.attempt))
            elif message.HasField("submit"):
                yield pb.FromDecode(prefill_on=pb.PrefillOn(attempt=message.submit.attempt, worker="local"))
                for run in self._runs(message.submit):
                    yield pb.FromDecode(tokens=pb.Tokens(runs=[run]))

    def _runs(self, submit: pb.Submit) -> list[pb.TokenRun]:
        known = len(submit.samples[0].emitted)
        count = submit.max_tokens - known if self.hold is None else self.hold
        end = "length" if known + count == submit.max_tokens else ""
        ids = range(100 + known, 100 + known + count)
        first = pb.TokenRun(attempt=submit.attempt, offset=known, ids=ids[:1], end=end if count == 1 else "")
        rest = pb.TokenRun(attempt=submit.attempt, offset=known + 1, ids=ids[1:], end=end)
        return [first] if count == 1 else [first, rest]


@asynccontextmanager
async def small_worker(*, hold: int | None = None, port: int = 0) -> AsyncIterator[SmallWorker]:
    """A worker that serves, and is stopped whatever the test does."""
    worker = SmallWorker("d0", hold=hold)
    await worker.start(port)
    try:
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def router(*addresses: str, secret: str = SECRET, queue_limit: int = 4) -> AsyncIterator[RouterRuntime]:
    """A running runtime that knows these workers; its books are clean when it leaves."""
    epoch = new_epoch()
    timing = TimingSettings(suspect_s=30)
    core = DispatcherCore(
        RouterSettings(queue_limit=queue_limit), timing, epoch, random.Random(1), unavailable_s=PATIENCE_S
    )
    runtime = RouterRuntime(core, SystemClock(), epoch=epoch, credentials=Credentials(secret))
    serving = asyncio.create_task(runtime.serve())
    runtime.set_members(addresses)
    try:
        yield runtime
        runtime.check_integrity()
        gauges = runtime.status()["gauges"]
        assert isinstance(gauges, dict)
        assert not any(gauges.values())
    finally:
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


def ask(name: str = "r1", max_tokens: int = 5) -> Request:
    return Request(name, "mine", (1, 2, 3), max_tokens, deadline_s=PATIENCE_S)


async def tokens_of(running: Running) -> AsyncIterator[TokenEvent]:
    """Its events: nobody here asks for log-probabilities of a prompt."""
    async for event in running.events():
        assert isinstance(event, TokenEvent)
        yield event


async def collect(runtime: RouterRuntime, request: Request) -> list[int]:
    async with asyncio.timeout(PATIENCE_S), runtime.run(request) as running:
        return [token async for event in tokens_of(running) for token in event.ids]


async def test_a_request_goes_to_the_worker_and_its_tokens_come_back() -> None:
    async with small_worker() as worker, router(worker.address) as runtime:
        async with asyncio.timeout(PATIENCE_S), runtime.run(ask()) as running:
            events = [event async for event in tokens_of(running)]
        assert [token for event in events for token in event.ids] == [100, 101, 102, 103, 104]
        assert events[-1].end == "length"
        assert (running.trace.decode_worker, running.trace.prefill_worker, running.trace.attempts) == ("d0", "local", 1)
        assert {"queue", "placed", "ttft"} <= set(running.trace.timings_ms)
        assert SECRET not in str(worker.metadata)
        assert runtime.limits().pool_tokens == 9999 * 16
        await worker.heard.first(lambda m: m.ended.attempt == "r1.1")


async def test_leaving_the_context_cancels_on_the_worker() -> None:
    async with small_worker(hold=1) as worker, router(worker.address) as runtime:
        async with asyncio.timeout(PATIENCE_S), runtime.run(ask()) as running:
            assert (await anext(tokens_of(running))).ids == (100,)
            running.stop(0)
            with pytest.raises(IndexError):
                running.stop(1)
        await worker.heard.first(lambda m: m.stop_seq.attempt == "r1.1")
        async with asyncio.timeout(PATIENCE_S), runtime.run(ask("r2")) as running:
            assert (await anext(tokens_of(running))).ids == (100,)
        await worker.heard.first(lambda m: m.cancel.attempt == "r2.1")


async def test_who_takes_tokens_at_once_may_stop_their_sample() -> None:
    async with small_worker(hold=2) as worker, router(worker.address) as runtime:
        async with asyncio.timeout(PATIENCE_S), runtime.run(ask()) as running:
            taken: list[int] = []

            def take(event: TokenEvent) -> bool:
                taken.extend(event.ids)
                running.stop(0)
                return True

            running.offer(take)
            assert [event async for event in tokens_of(running)] == []
        assert taken == [100]
        await worker.heard.first(lambda m: m.stop_seq.attempt == "r1.1")


async def test_a_restarted_worker_is_a_new_peer_and_the_stream_goes_on() -> None:
    async with small_worker(hold=1) as old, router(old.address) as runtime, runtime.run(ask()) as running:
        async with asyncio.timeout(PATIENCE_S):
            events = tokens_of(running)
            assert (await anext(events)).ids == (100,)
            await old.stop()
            async with small_worker(port=int(old.address.rsplit(":", 1)[1])) as new:
                assert [token async for event in events for token in event.ids] == [101, 102, 103, 104]
                submit = await new.heard.first(lambda m: m.HasField("submit"))
            assert running.trace.attempts == 2
            assert list(submit.submit.samples[0].emitted) == [100]


async def test_a_gap_in_the_watch_opens_it_again_and_disturbs_no_stream() -> None:
    async with small_worker(hold=1) as worker, router(worker.address) as runtime, runtime.run(ask()) as running:
        async with asyncio.timeout(PATIENCE_S):
            assert (await anext(tokens_of(running))).ids == (100,)
            worker.watches[0].put_nowait(WatchEvent(sequence=9, status=Status(ready=True)))
            await worker.opened_again.wait()
            assert await collect(runtime, ask("r2", max_tokens=1)) == [100]
        assert running.trace.attempts == 1


async def test_a_full_queue_and_no_worker_are_told_apart() -> None:
    async with router(queue_limit=1) as runtime:
        with pytest.raises(Unavailable):
            runtime.limits()
        assert not runtime.ready()
        async with runtime.run(ask("a")):
            with pytest.raises(Overloaded):
                await collect(runtime, ask("b"))


async def test_a_wrong_secret_never_becomes_a_worker() -> None:
    async with small_worker() as worker, router(worker.address, secret="wrong-secret-0000") as runtime:
        async with runtime.run(ask()) as running:
            pass
        assert not runtime.ready()
        assert running.trace.attempts == 0
        assert not worker.opened


async def test_a_client_that_never_reads_is_ended() -> None:
    slow, hold = ask("slow", max_tokens=MAX_HELD_IDS + 2000), MAX_HELD_IDS + 1000
    async with (
        small_worker(hold=hold) as worker,
        router(worker.address) as runtime,
        runtime.run(slow) as running,
    ):
        async with asyncio.timeout(PATIENCE_S):
            await worker.heard.first(lambda m: m.cancel.attempt == "slow.1")
            with pytest.raises(RequestFailed):
                _ = [event async for event in tokens_of(running)]


async def test_an_error_of_our_own_ends_the_router_and_tells_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[object]:
        raise IntegrityError("the books disagree")

    epoch = new_epoch()
    core = DispatcherCore(RouterSettings(), TimingSettings(), epoch, random.Random(1))
    runtime = RouterRuntime(core, SystemClock(), epoch=epoch, credentials=Credentials(SECRET))
    serving = asyncio.create_task(runtime.serve())
    async with small_worker(hold=1) as worker, asyncio.timeout(PATIENCE_S):
        runtime.set_members([worker.address])
        async with runtime.run(ask()) as running:
            events = tokens_of(running)
            assert (await anext(events)).ids == (100,)
            monkeypatch.setattr(core, "on_session", broken)
            await worker.stop()
            with pytest.raises(RequestFailed):
                await anext(events)
        with pytest.raises(IntegrityError):
            await serving


async def test_shutting_down_ends_requests_honestly() -> None:
    epoch = new_epoch()
    core = DispatcherCore(RouterSettings(), TimingSettings(), epoch, random.Random(1))
    runtime = RouterRuntime(core, SystemClock(), epoch=epoch, credentials=Credentials(SECRET))
    serving = asyncio.create_task(runtime.serve())
    async with small_worker(hold=1) as worker, asyncio.timeout(PATIENCE_S):
        runtime.set_members([worker.address])
        async with runtime.run(ask()) as running:
            events = tokens_of(running)
            assert (await anext(events)).ids == (100,)
            serving.cancel()
            with pytest.raises(RequestFailed):
                await anext(events)
        await worker.heard.first(lambda m: m.cancel.attempt == "r1.1")
        with pytest.raises(asyncio.CancelledError):
            await serving
