"""What a client of a chaos run takes from an HTTP answer, whole or cut anywhere."""

import asyncio
import json
from collections.abc import Iterable

import pytest

from chaos.ask import Ask, Manner
from chaos.exchange import End, Exchange, over_http
from cluster.core.clock import ManualClock

ASK = Ask((1, 2), max_tokens=3)


def chunked(parts: Iterable[bytes], *, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if end else b"")


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def choice(text: str, reason: str | None = None) -> dict[str, object]:
    return {"index": 0, "text": text, "finish_reason": reason}


STREAM = [
    event(choices=[choice("ab")]),
    event(choices=[choice("c", "length")]),
    event(choices=[], usage={"completion_tokens": 3}),
    b": x-headrace-attempts: 2\n\ndata: [DONE]\n\n",
]


SCORED = [("a", -0.5), ("b", -2.0)]


async def ask(answer: bytes, manner: Manner) -> Exchange:
    """Ask a server that says these bytes and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(5):
        host, port = server.sockets[0].getsockname()
        return await over_http(f"http://{host}:{port}", "m", ASK, manner, ManualClock())


def whole(status: str, body: object, extra: str = "") -> bytes:
    raw = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\n{extra}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def test_a_stream() -> None:
    exchange = await ask(chunked(STREAM), Manner("http", stream=True))
    assert (exchange.end, exchange.texts, exchange.reasons) == (End.OK, ["abc"], ["length"])
    assert (exchange.attempts, exchange.completion_tokens) == (2, 3)
    assert exchange.arrivals


async def test_logprobs_of_a_stream() -> None:
    parts = [event(choices=[{**choice(text), "logprobs": {"token_logprobs": [value]}}]) for text, value in SCORED]
    exchange = await ask(chunked([*parts, STREAM[1]]), Manner("http", stream=True))
    assert (exchange.texts, exchange.logprobs) == (["abc"], [[-0.5, -2.0]])


@pytest.mark.parametrize("parts", range(4))
async def test_a_stream_without_its_end_is_broken(parts: int) -> None:
    exchange = await ask(chunked(STREAM[:parts], end=False), Manner("http", stream=True))
    assert exchange.end is End.BROKEN
    assert "abc".startswith(exchange.texts[0])


async def test_an_orderly_end_without_done_is_broken() -> None:
    assert (await ask(chunked(STREAM[:3]), Manner("http", stream=True))).end is End.BROKEN


async def test_an_error_event_is_a_failure_whatever_follows() -> None:
    parts = [STREAM[0], event(error={"message": "no"}), STREAM[3]]
    exchange = await ask(chunked(parts), Manner("http", stream=True))
    assert exchange.end is End.FAILED
    assert "no" in exchange.detail


async def test_a_whole_answer_and_half_of_one() -> None:
    body = {"choices": [choice("abc", "length")], "usage": {"completion_tokens": 3}}
    raw = whole("200 OK", body, "x-headrace-attempts: 1\r\n")
    exchange = await ask(raw, Manner("http", stream=False))
    assert (exchange.end, exchange.texts, exchange.attempts) == (End.OK, ["abc"], 1)
    assert (await ask(raw[:-5], Manner("http", stream=False))).end is End.BROKEN
    assert (await ask(b"", Manner("http", stream=False))).end is End.BROKEN


@pytest.mark.parametrize(("status", "end"), [(429, End.BUSY), (503, End.BUSY), (500, End.FAILED), (400, End.FAILED)])
async def test_statuses(status: int, end: End) -> None:
    exchange = await ask(whole(f"{status} X", {"error": {}}, "retry-after: 2\r\n"), Manner("http", stream=True))
    assert exchange.end is end
    if end is End.BUSY:
        assert exchange.retry_after_s == 2.0


async def test_nobody_listens() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    exchange = await over_http(f"http://{host}:{port}", "m", ASK, Manner("http", stream=True), ManualClock())
    assert exchange.end is End.UNREACHABLE
