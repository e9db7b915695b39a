"""What a client may take of a router's gRPC door: connections, streams, metadata, messages. Others are served on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.rpc import Metadata, PublicDoor, RpcServer, channel, make_server

WITHIN_S = 30.0
STREAMS = 256
METADATA = 16 * 1024
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def door(options: PublicDoor) -> AsyncIterator[RpcServer]:
    server = make_server("127.0.0.1", 0, [], options)
    await server.start()
    yield server
    await server.stop(0)


async def check(wire: grpc.aio.Channel, service: str = "", metadata: Metadata = ()) -> grpc.StatusCode:
    """How a call with one small message ends."""
    question = health_pb2.HealthCheckRequest(service=service)
    call = health_pb2_grpc.HealthStub(wire).Check(question, metadata=metadata, timeout=WITHIN_S)
    code: grpc.StatusCode = await call.code()
    return code


async def hung_up_on(port: int) -> bool:
    """Whether a connection that says nothing is closed at once; the server speaks first where it is kept."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(reader.read(1), WITHIN_S) == b""
    except ConnectionError:
        return True
    finally:
        writer.transport.abort()


async def test_a_connection_beyond_those_allowed_is_closed_and_the_others_go_on() -> None:
    async with door(PublicDoor(max_connections=2)) as server, channel(server.address) as one:
        assert await check(one) is grpc.StatusCode.OK
        async with channel(server.address) as two:
            assert await check(two) is grpc.StatusCode.OK
            assert await hung_up_on(server.port)
            assert await check(one) is await check(two) is grpc.StatusCode.OK
        async with asyncio.timeout(WITHIN_S):  # its place is free once the server has noticed
            while await hung_up_on(server.port):
                await asyncio.wait({asyncio.ensure_future(check(one))})


async def test_a_connection_has_so_many_streams_and_the_next_waits_for_one_to_end() -> None:
    async with door(PublicDoor()) as server, channel(server.address) as wire:
        stub = health_pb2_grpc.HealthStub(wire)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(STREAMS)]
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
        further = asyncio.ensure_future(check(wire))
        assert not (await asyncio.wait({further}, timeout=0.3))[0]
        async with channel(server.address) as other:
            assert await check(other) is grpc.StatusCode.OK, "another connection has its own"
        assert not further.done()
        watches[0].cancel()
        assert await further is grpc.StatusCode.OK
        for watch in watches:
            watch.cancel()


@pytest.mark.parametrize(
    ("size", "ends"), [(METADATA // 2, grpc.StatusCode.OK), (4 * METADATA, grpc.StatusCode.RESOURCE_EXHAUSTED)]
)
async def test_metadata_beyond_a_few_kilobytes_are_refused(size: int, ends: grpc.StatusCode) -> None:
    async with door(PublicDoor()) as server, channel(server.address) as wire:
        assert await check(wire, metadata=(("x-filling", "x" * size),)) is ends
        assert await check(wire) is grpc.StatusCode.OK


@pytest.mark.parametrize("size", [500, 2000])
async def test_a_message_beyond_the_bound_is_refused(size: int) -> None:
    """What is within it is read: there is no service of that name."""
    within = replace(PublicDoor(), max_message_bytes=1000)
    async with door(within) as server, channel(server.address) as wire:
        ends = grpc.StatusCode.NOT_FOUND if size < within.max_message_bytes else grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check(wire, "x" * size) is ends
        assert await check(wire) is grpc.StatusCode.OK
