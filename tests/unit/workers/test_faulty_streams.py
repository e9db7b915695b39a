"""Fault points of a worker's server: streams that break, watches that are dropped, stages that end a life."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.core.faults import Faults, FaultSpec, Stages
from cluster.faulty import make_publisher, make_stages, make_stream
from cluster.streams import ServerStream
from cluster.stubs.session_pb2 import FromDecode, FromRouter, PrefillOn, WorkerLost
from cluster.stubs.watch_pb2 import Status, WatchHello, WatchRequest
from cluster.watch import WatchPublisher

NONE = Faults()


class Context:
    """A stream's context: remembers what was written."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self._more = asyncio.Condition()

    async def write(self, message: object) -> None:
        async with self._more:
            self.written.append(message)
            self._more.notify_all()

    async def until(self, count: int) -> None:
        """Until so many messages were written."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.written) >= count)


async def silence() -> AsyncIterator[FromRouter]:
    """A peer that says nothing and stays."""
    await asyncio.Event().wait()
    yield FromRouter()


def said(number: int) -> FromDecode:
    return FromDecode(prefill_on=PrefillOn(attempt=str(number)))


def stream_of(context: Any, faults: Faults, stages: Stages | None = None) -> ServerStream[FromRouter, FromDecode]:
    return make_stream(context, faults.trigger("session.break"), stages or make_stages(NONE))


async def test_without_faults_everything_is_the_plain_thing() -> None:
    assert type(stream_of(Context(), NONE)) is ServerStream
    publisher = make_publisher(WatchHello(), list, Status, 1.0, NONE)
    assert type(publisher) is WatchPublisher


async def test_a_stream_ends_instead_of_its_nth_message() -> None:
    context = Context()
    stream = stream_of(context, Faults([FaultSpec("session.break", nth=3)]))
    async with asyncio.timeout(5):
        running = asyncio.create_task(stream.run(silence(), lambda _: None))
        for number in (1, 2):
            stream.send(said(number))
            await context.until(number)
        stream.send(said(3))
        stream.send(said(4))
        await running
    assert context.written == [said(1), said(2)]


async def test_a_stage_is_passed_when_its_message_leaves() -> None:
    happened: list[object] = []
    stages = Stages(Faults([FaultSpec("offer.freeze", 1.5, nth=1)]), kill=lambda: None, freeze=happened.append)

    class Offer:
        def WhichOneof(self, _: str) -> str:
            return "offer"

    stream: ServerStream[Any, Any] = make_stream(Context(), None, stages)  # type: ignore[arg-type]
    stream.send(FromDecode(lost=WorkerLost()))
    assert happened == []
    stream.send(Offer())
    assert happened == [1.5]


async def test_a_watch_is_dropped_instead_of_a_heartbeat() -> None:
    publisher = make_publisher(WatchHello(), list, Status, 1.0, Faults([FaultSpec("watch.drop", nth=2)]))
    context: Any = Context()
    context.peer = lambda: "a router"
    aborted = asyncio.Event()

    async def abort(*_: object) -> None:
        aborted.set()

    context.abort = abort
    async with asyncio.timeout(5):
        watching = asyncio.create_task(publisher.Open(WatchRequest(), context))
        await context.until(3)  # hello, snapshot, status
        publisher.publish_status()
        await context.until(4)
        assert publisher.subscribers == 1
        publisher.publish_status()
        await watching
    assert aborted.is_set()
    assert publisher.subscribers == 0
    assert len(context.written) == 4


class StuckContext(Context):
    """Its reader does not read: the first write never ends."""

    async def write(self, message: object) -> None:
        await super().write(message)
        await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["cut", "too much"])
async def test_a_cut_stream_ends_while_a_write_is_stuck(how: str) -> None:
    context: Any = StuckContext()
    stream: ServerStream[FromRouter, FromDecode] = ServerStream(context, limit=100)
    async with asyncio.timeout(5):
        running = asyncio.create_task(stream.run(silence(), lambda _: None))
        stream.send(said(0))
        await context.until(1)
        for number in range(100 if how == "cut" else 5000):
            stream.send(said(number))
        if how == "cut":
            stream.cut()
        stream.close()
        assert not stream._queue.qsize(), "what nobody will read"
        await running
    assert context.written == [said(0)]
