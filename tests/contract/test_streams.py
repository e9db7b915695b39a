"""A worker's streams over real gRPC, to a peer that does not read: it loses its stream."""

from __future__ import annotations  # grpc's type stubs are generic where its classes are not

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.credentials import Credentials
from cluster.rpc import Service, channel, make_server, proof_metadata, service
from cluster.streams import ServerStream
from cluster.stubs import link_pb2, link_pb2_grpc, session_pb2, session_pb2_grpc

CREDENTIALS = Credentials("0123456789abcdef")
LIMIT = 100
PATIENCE_S = 10.0
TEXT = "x" * 100_000  # some of these fill every buffer on the way


class Server(session_pb2_grpc.SessionServicer, link_pb2_grpc.LinkServicer):
    """Both kinds of a worker's streams, as its server makes them."""

    def __init__(self) -> None:
        self.streams: list[ServerStream[Any, Any]] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def Open(  # type: ignore[override]  # a coroutine that writes is allowed too
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        stream = ServerStream(context, limit=LIMIT)
        self.streams.append(stream)
        self.begun.set()
        try:
            await stream.run(request_iterator, lambda _: None)
        finally:
            self.ended.set()


def session(server: Server) -> Service:
    return service(session_pb2.DESCRIPTOR, "Session", session_pb2_grpc.add_SessionServicer_to_server, server)


def link(server: Server) -> Service:
    return service(link_pb2.DESCRIPTOR, "Link", link_pb2_grpc.add_LinkServicer_to_server, server)


KINDS: dict[str, tuple[Any, ...]] = {
    "session": (
        session,
        session_pb2_grpc.SessionStub,
        session_pb2.FromRouter(),
        session_pb2.FromDecode(lost=session_pb2.WorkerLost(reason=TEXT)),
    ),
    "link": (
        link,
        link_pb2_grpc.LinkStub,
        link_pb2.FromDecodePeer(),
        link_pb2.FromPrefill(lost=link_pb2.WorkerGone(reason=TEXT)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_does_not_read_loses_its_stream(kind: str) -> None:
    """Its write never ends, so the cut must not wait for it; and what is sent after the cut is kept nowhere."""
    make_service, stub, hello, message = KINDS[kind]
    worker = Server()
    server = make_server("127.0.0.1", 0, [make_service(worker)], CREDENTIALS)
    await server.start()
    try:
        async with asyncio.timeout(PATIENCE_S), channel(server.address) as to_it:
            call = stub(to_it).Open(metadata=proof_metadata(CREDENTIALS.proof(server.address)))
            await call.write(hello)
            await worker.begun.wait()
            [stream] = worker.streams
            while not worker.ended.is_set():
                stream.send(message)
                assert stream._queue.qsize() <= LIMIT
                await asyncio.sleep(0)
            for _ in range(50 * LIMIT):
                stream.send(message)
                stream.close()
            assert stream._queue.empty()
            heard = [message async for message in call]  # once it reads again, it learns that this was the end
            assert len(heard) < LIMIT
            assert await call.code() is grpc.StatusCode.OK
    finally:
        await server.stop(0)
