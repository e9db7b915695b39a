"""A client that leaves, at any moment: the work is let go and one outcome counted (FAULTS R13, O07).

Outcomes are read after the server has stopped, which waits for every handler.
"""

import asyncio

import httpx
import pytest

from cluster.core.config import RouterSettings
from router.requests import Limits, TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, Step, say
from tests.integration.front_door_server import MODEL, Served, serve

PATIENCE_S = 10


def completion(stream: bool) -> bytes:
    return b'{"model": "%s", "prompt": "x", "stream": %s}' % (MODEL.encode(), b"true" if stream else b"false")


async def post_raw(
    served: Served, body: bytes, *, declared: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Write a request and nothing more; `declared` lies about the length of the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    length = len(body) if declared is None else declared
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("half_close", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_leaving_while_the_answer_is_made(stream: bool, tokens: int, half_close: bool) -> None:
    forever = asyncio.Event()
    steps: list[Step] = [*[TokenEvent(0, (65,))] * tokens, forever]
    dispatcher = FakeDispatcher(lambda _: steps)
    async with serve(dispatcher) as served, asyncio.timeout(PATIENCE_S):
        reader, writer = await post_raw(served, completion(stream))
        await dispatcher.until_active(1)
        if stream and tokens:
            await reader.readuntil(b"data: ")
        if half_close:
            writer.write_eof()
        else:
            writer.close()
        await dispatcher.until_active(0)
        writer.close()
    assert served.outcomes("completions") == {"cancelled": 1}


async def test_leaving_in_mid_body() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, asyncio.timeout(PATIENCE_S):
        reader, writer = await post_raw(served, b'{"model"', declared=1000)
        writer.write_eof()
        await reader.read()
        writer.close()
    assert served.outcomes("completions") == {"cancelled": 1}
    assert not dispatcher.requests


async def test_a_body_that_never_ends_is_given_up() -> None:
    async with serve(FakeDispatcher(say("x")), RouterSettings(deadline_s=0.2)) as served, asyncio.timeout(PATIENCE_S):
        reader, writer = await post_raw(served, b'{"model"', declared=1000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
    assert served.outcomes("completions") == {"client_error": 1}


async def test_a_client_that_never_reads_does_not_outlive_its_deadline() -> None:
    """The line fills up and the write blocks: the request still ends, and its place is free again."""
    limits = Limits(max_context=10_000_000, pool_tokens=10_000_000, block_size=16, vocab_size=1024, eos_ids=())
    flood = [TokenEvent(0, tuple(b"x" * 20))] * 400_000  # 80 MB: more than any socket's buffers hold
    dispatcher = FakeDispatcher(lambda _: flood, limits)
    async with serve(dispatcher, RouterSettings(deadline_s=0.2)) as served, asyncio.timeout(PATIENCE_S):
        _, writer = await post_raw(served, completion(stream=True))
        await dispatcher.until_active(1)
        await dispatcher.until_active(0)
        writer.transport.abort()
    assert served.outcomes("completions") == {"deadline": 1}


async def test_outcomes_add_up() -> None:
    """100 requests, of which 10 leave and 10 are invalid."""
    forever = asyncio.Event()
    dispatcher = FakeDispatcher(lambda r: [TokenEvent(0, (65,)), forever] if len(r.prompt) == 2 else say("ab")(r))
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:

        async def post(prompt: str) -> int:
            body = {"model": MODEL, "prompt": prompt}
            return (await client.post("/v1/completions", json=body)).status_code

        leaving = [asyncio.create_task(post("xx")) for _ in range(10)]
        async with asyncio.timeout(PATIENCE_S):
            await dispatcher.until_active(10)
            statuses = await asyncio.gather(*[post("x") for _ in range(80)], *[post("") for _ in range(10)])
            for task in leaving:
                task.cancel()
            await dispatcher.until_active(0)
        await asyncio.gather(*leaving, return_exceptions=True)
    assert statuses == [200] * 80 + [400] * 10
    assert served.outcomes("completions") == {"ok": 80, "client_error": 10, "cancelled": 10}
    registry = served.front.metrics.registry
    assert registry.get_sample_value("headrace_ttft_seconds_count", {"api": "completions"}) == 90
    assert registry.get_sample_value("headrace_requests_in_flight") == 0
