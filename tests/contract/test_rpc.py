"""The gRPC server every program uses, on real sockets: credentials, limits, health, reflection, and the watch on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import rpc
from cluster.core.clock import ManualClock, SystemClock
from cluster.core.errors import ConfigError
from cluster.core.keys import KEYS_PER_MESSAGE
from cluster.credentials import Credentials
from cluster.rpc import Metadata, PublicDoor, RpcServer, auth_metadata, channel, make_server, proof_metadata
from cluster.stubs import common_pb2, watch_pb2, watch_pb2_grpc
from cluster.stubs.watch_pb2 import WatchEvent, WatchRequest
from cluster.watch import QUEUE_EVENTS, WatchPublisher
from router.effects import StreamClosed
from router.session_client import SessionClient

if TYPE_CHECKING:
    Events = grpc.aio.UnaryStreamCall[WatchRequest, WatchEvent]

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED,)
WITHIN_S = 60.0
SECRET = "0123456789abcdef"
MEMBER = Credentials(SECRET)


def good(address: str) -> Metadata:
    """A proof for one call: it is good once."""
    return proof_metadata(MEMBER.proof(address))


def stale(address: str) -> Metadata:
    clock = ManualClock()
    return proof_metadata(Credentials(SECRET, clock=clock).proof(address))  # made in 2023


BAD_CREDENTIALS: dict[str, Callable[[str], Metadata]] = {
    "none": lambda _: (),
    "wrong": lambda address: proof_metadata(Credentials("0123456789abcdeF").proof(address)),
    "prefix": lambda address: proof_metadata(Credentials(SECRET[:-1]).proof(address)),
    "the secret itself": lambda _: (("headrace-proof", SECRET),),
    "the secret as a key": lambda _: auth_metadata(SECRET),
    "two": lambda address: good(address) + good(address),
    "cut short": lambda address: (("headrace-proof", good(address)[0][1][:-1]),),
    "for another port": lambda _: good("127.0.0.1:1"),
    "old": stale,
    "dots": lambda _: (("headrace-proof", "." * 300),),
    "not ascii": lambda _: (("headrace-proof", b"a.b.\xff\xfe"),),  # type: ignore[dict-item, return-value]
}


async def drained(stream: Events) -> list[WatchEvent]:
    """Every event of a stream until its end, however that comes."""
    events = []
    while isinstance(event := await stream.read(), WatchEvent):
        events.append(event)
    return events


async def opening(stream: Events) -> list[WatchEvent]:
    """The three events every watch starts with."""
    return [await following(stream) for _ in range(3)]


async def following(stream: Events) -> WatchEvent:
    """The next event; fails when the stream has ended."""
    event = await stream.read()
    assert isinstance(event, WatchEvent)
    return event


class Worker:
    """A watch publisher on a real server, with a prefix index and a status that the test owns."""

    def __init__(self) -> None:
        self.index = {b"%016d" % number for number in range(3)}
        self.state = watch_pb2.Status(ready=True, free_blocks=7)
        hello = watch_pb2.WatchHello(identity=common_pb2.WorkerIdentity(worker="decode-0", epoch=2**64 - 1))
        self.publisher = WatchPublisher(hello, self.snapshot, lambda: self.state, heartbeat_s=3600.0)
        self.server: RpcServer = make_server("127.0.0.1", 0, [self.publisher.service()], Credentials(SECRET))

    def good(self) -> Metadata:
        return good(self.server.address)

    def snapshot(self) -> list[bytes]:
        return sorted(self.index)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    one = Worker()
    await one.server.start()
    yield one
    one.publisher.close()
    await one.server.stop(0)


@pytest.fixture
async def wire(worker: Worker) -> AsyncIterator[grpc.aio.Channel]:
    async with channel(worker.server.address) as one:
        yield one


@pytest.mark.parametrize("credentials", BAD_CREDENTIALS.values(), ids=BAD_CREDENTIALS)
async def test_calls_without_the_secret_are_refused(
    worker: Worker, wire: grpc.aio.Channel, credentials: Callable[[str], Metadata]
) -> None:
    stub = watch_pb2_grpc.WatchStub(wire)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await drained(stub.Open(WatchRequest(), metadata=credentials(worker.server.address), timeout=5))
    expected = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL}  # INTERNAL: not a legal header at all
    assert refused.value.code() in expected


async def test_a_proof_that_was_overheard_is_good_for_nothing(worker: Worker, wire: grpc.aio.Channel) -> None:
    overheard = good(worker.server.address)
    first = watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=overheard, timeout=5)
    await opening(first)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await drained(watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=overheard, timeout=5))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_listens_where_a_worker_was_learns_nothing_and_is_not_believed() -> None:
    """It speaks the protocol, lets everybody in, and repeats what it was told."""
    said: list[object] = []

    async def pretend(given: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        metadata = dict(context.invocation_metadata() or ())
        said.append(metadata)
        await context.send_initial_metadata((("headrace-answer", str(metadata["headrace-proof"])),))
        said.extend([message async for message in given])

    stranger = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(pretend)
    stranger.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headrace.v1.Session", {"Open": handler}),))
    address = f"127.0.0.1:{stranger.add_insecure_port('127.0.0.1:0')}"
    await stranger.start()
    events: asyncio.Queue[object] = asyncio.Queue()
    keeper = SessionClient(
        address, MEMBER, SystemClock(), random.Random(1), events.put_nowait, on_event=lambda _, e: events.put_nowait(e)
    )
    keeper.open()
    closed = await asyncio.wait_for(events.get(), 10)
    await keeper.close()
    await stranger.stop(0)
    assert isinstance(closed, StreamClosed), closed
    assert "secret" in closed.reason
    assert len(said) == 1, "nothing but the first metadata came"
    assert SECRET not in str(said)


async def test_an_unknown_method_with_a_proof_is_unknown(worker: Worker, wire: grpc.aio.Channel) -> None:
    call = wire.unary_unary("/headrace.v1.Nothing/Here", bytes, bytes)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", metadata=worker.good(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unknown_method_without_the_secret_does_not_tell_that_it_is_unknown(wire: grpc.aio.Channel) -> None:
    call = wire.unary_unary("/headrace.v1.Nothing/Here", bytes, bytes)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("service", ["", "headrace.v1.Watch"])
async def test_health_is_open_and_tells_the_truth(worker: Worker, wire: grpc.aio.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(wire)
    status = health_pb2.HealthCheckResponse.ServingStatus
    question = health_pb2.HealthCheckRequest(service=service)
    assert (await stub.Check(question, timeout=5)).status == status.NOT_SERVING
    await worker.server.set_serving(True)
    assert (await stub.Check(question, timeout=5)).status == status.SERVING


WATCH_HEALTH = "/grpc.health.v1.Health/Watch"


async def test_health_is_told_once_without_the_secret_and_followed_with_it(
    worker: Worker, wire: grpc.aio.Channel
) -> None:
    """A stream without an end costs memory for as long as a stranger likes."""
    stranger = wire.unary_stream(WATCH_HEALTH, None, None)(b"", timeout=WITHIN_S / 4)
    assert await stranger.code() is grpc.StatusCode.UNAUTHENTICATED
    following_it = health_pb2_grpc.HealthStub(wire).Watch(
        health_pb2.HealthCheckRequest(), metadata=good(worker.server.address)
    )
    assert (await following_it.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    following_it.cancel()


async def test_refusals_do_not_fill_the_log_nor_write_lines_of_it(
    worker: Worker, wire: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_TELL_S", 3600.0)
    for name in ("One\nready at 10.0.0.7:1", "Two", "Three"):
        assert await wire.unary_stream(f"/headrace.v1.{name}/Open", None, None)(b"").code() is UNAUTHENTICATED
    monkeypatch.setattr(rpc, "_TELL_S", 0.0)
    assert await wire.unary_stream("/headrace.v1.Four/Open", None, None)(b"").code() is UNAUTHENTICATED
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(told) == 2
    assert "\n" not in told[0]
    assert told[1].endswith("'/headrace.v1.Four/Open', and 2 before it")


@pytest.mark.parametrize("sends", ["nothing", "an end"])
@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", WATCH_HEALTH])
async def test_a_call_whose_message_does_not_come_is_ended(
    method: str, sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stranger, and of a client with a key."""
    monkeypatch.setattr(rpc, "_CHECK_S", 0.1)
    server = make_server("127.0.0.1", 0, [], PublicDoor(message_s=0.1))
    await server.start()
    try:
        async with channel(server.address) as wire:
            call = wire.stream_stream(method, None, None)(None)
            if sends == "an end":
                monkeypatch.setattr(rpc, "_CHECK_S", WITHIN_S)
                await call.done_writing()
            code = await asyncio.wait_for(call.code(), WITHIN_S)
            assert code in (SILENT if sends == "nothing" else (*SILENT, grpc.StatusCode.INVALID_ARGUMENT))
            monkeypatch.setattr(rpc, "_CHECK_S", WITHIN_S)
            answer = await health_pb2_grpc.HealthStub(wire).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await server.stop(0)


async def test_the_health_of_an_unknown_service_is_not_found(wire: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(wire)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Check(health_pb2.HealthCheckRequest(service="headrace.v1.Nothing"), timeout=5)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_needs_the_secret_and_lists_the_services(worker: Worker, wire: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(wire)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ServerReflectionInfo(iter([question]), timeout=5).read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    answers = [a async for a in stub.ServerReflectionInfo(iter([question]), metadata=worker.good(), timeout=5)]
    names = {each.name for each in answers[0].list_services_response.service}
    assert "headrace.v1.Watch" in names


async def test_two_servers_never_share_a_port(worker: Worker) -> None:
    with pytest.raises(ConfigError, match=str(worker.server.port)):
        make_server("127.0.0.1", worker.server.port, [], Credentials(SECRET))


async def test_the_bound_interface_is_the_given_one(worker: Worker) -> None:
    assert worker.server.address == f"127.0.0.1:{worker.server.port}"
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.2", worker.server.port)


async def test_watch_begins_with_hello_snapshot_and_status(worker: Worker, wire: grpc.aio.Channel) -> None:
    stream = watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=worker.good(), timeout=10)
    first = await opening(stream)
    assert [event.WhichOneof("event") for event in first] == ["hello", "snapshot", "status"]
    assert [event.sequence for event in first] == [1, 2, 3]
    assert first[0].hello.identity.epoch == 2**64 - 1
    assert first[1].snapshot.keys == b"".join(sorted(worker.index))
    assert first[2].status == worker.state


async def test_a_large_cache_comes_in_pieces_and_what_changes_meanwhile_comes_after_it(
    worker: Worker, wire: grpc.aio.Channel
) -> None:
    worker.index = {b"%016d" % number for number in range(2 * KEYS_PER_MESSAGE + 1)}
    stream = watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=worker.good(), timeout=10)
    events = [await following(stream)]
    gone, kept = sorted(worker.index)[-1], worker.snapshot()
    worker.index.discard(gone)
    worker.publisher.publish_removed([gone])  # it is in a piece that has not been sent, or has only just been
    events += [await following(stream) for _ in range(5)]
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5, 6]
    pieces = [event.snapshot.keys for event in events[1:4]]
    assert [len(piece) // 16 for piece in pieces] == [KEYS_PER_MESSAGE, KEYS_PER_MESSAGE, 1]
    assert b"".join(pieces) == b"".join(kept)
    assert (events[4].status, events[5].removed.keys) == (worker.state, gone)


async def test_watch_sends_only_the_last_state_of_a_key_in_a_batch(worker: Worker, wire: grpc.aio.Channel) -> None:
    stream = watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=worker.good(), timeout=10)
    await opening(stream)
    stays, leaves = b"a" * 16, b"b" * 16
    worker.publisher.publish_stored([stays, leaves])
    worker.publisher.publish_removed([leaves])
    removed, stored = await following(stream), await following(stream)
    assert (removed.sequence, removed.removed.keys) == (4, leaves)
    assert (stored.sequence, stored.stored.keys) == (5, stays)
    worker.state = watch_pb2.Status(draining=True)
    worker.publisher.publish_status()
    assert (await following(stream)).status.draining


async def test_watch_ends_in_order_when_the_worker_stops(worker: Worker, wire: grpc.aio.Channel) -> None:
    stream = watch_pb2_grpc.WatchStub(wire).Open(WatchRequest(), metadata=worker.good(), timeout=10)
    await opening(stream)
    beating = asyncio.ensure_future(worker.publisher.run())
    assert (await following(stream)).WhichOneof("event") == "status"
    beating.cancel()
    assert await drained(stream) == []
    assert worker.publisher.subscribers == 0


async def test_a_watcher_that_does_not_read_is_dropped_and_others_are_served(worker: Worker) -> None:
    bulky = {"x" * 60 * 1024: 1}  # so that the buffers on the way fill up before the queue does
    worker.state = watch_pb2.Status(ready=True, counters=bulky)
    async with channel(worker.server.address) as first, channel(worker.server.address) as second:
        silent = watch_pb2_grpc.WatchStub(first).Open(WatchRequest(), metadata=worker.good(), timeout=30)
        await silent.initial_metadata()
        reading = watch_pb2_grpc.WatchStub(second).Open(WatchRequest(), metadata=worker.good(), timeout=30)
        await opening(reading)
        assert worker.publisher.subscribers == 2
        sequence = 3
        while worker.publisher.subscribers == 2 and sequence < 8 * QUEUE_EVENTS:
            worker.publisher.publish_status()
            sequence += 1
            assert (await following(reading)).sequence == sequence
        assert worker.publisher.subscribers == 1
        with pytest.raises(grpc.aio.AioRpcError) as dropped:
            await drained(silent)
        assert dropped.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
