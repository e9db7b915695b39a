"""One request over one connection, and everything its client saw. Nothing here knows what the answer should be.

The HTTP client is plain asyncio: it must tell an answer that was cut short from a whole one, and leave in the middle.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import cast
from urllib.parse import urlsplit

import grpc
import grpc.aio

from chaos.ask import Ask, Manner
from cluster.core.clock import Clock
from cluster.stubs.inference_pb2 import GenerateRequest, GenerateResponse
from cluster.stubs.inference_pb2_grpc import InferenceStub

Json = dict[str, object]


class End(Enum):
    """How an exchange ended, for its client."""

    OK = "ok"
    LEFT = "left by the client"
    LATE = "deadline of the client"
    BUSY = "429 or 503"
    FAILED = "failed"
    BROKEN = "connection broken"
    UNREACHABLE = "no connection"


@dataclass(slots=True)
class Exchange:
    """What came back. Per sample: `texts`, `tokens` (gRPC only), `reasons`, `logprobs` (of shown tokens over HTTP, of
    all over gRPC). `arrivals`: when tokens came.
    """

    asked: float
    texts: list[str]
    tokens: list[list[int]] | None
    reasons: list[str]
    logprobs: list[list[float]]
    arrivals: list[float] = field(default_factory=list)
    end: End = End.BROKEN
    detail: str = ""
    attempts: int = 0
    completion_tokens: int | None = None
    retry_after_s: float = 0.5
    ended: float = 0.0


def new_exchange(ask: Ask, manner: Manner, clock: Clock) -> Exchange:
    tokens: list[list[int]] | None = [[] for _ in range(ask.choices)] if manner.api == "grpc" else None
    logprobs: list[list[float]] = [[] for _ in range(ask.choices)]
    return Exchange(clock.now(), [""] * ask.choices, tokens, [""] * ask.choices, logprobs)


async def over_http(url: str, model: str, ask: Ask, manner: Manner, clock: Clock) -> Exchange:
    """POST /v1/completions at a router's base URL."""
    exchange = new_exchange(ask, manner, clock)
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:
        exchange.end, exchange.detail = End.UNREACHABLE, type(error).__name__
        return exchange
    received: list[tuple[float, bytes]] = []
    try:
        async with asyncio.timeout(manner.leaves_after_s):
            writer.write(_post(json.dumps(ask.body(model, stream=manner.stream)).encode()))
            while data := await reader.read(65536):
                received.append((clock.now(), data))
    except TimeoutError:
        exchange.end = End.LEFT
    except OSError as error:
        exchange.detail = type(error).__name__
    finally:
        writer.transport.abort()
    _read_http(exchange, received, manner)
    return exchange


async def over_grpc(
    channel: grpc.aio.Channel, model: str, ask: Ask, manner: Manner, clock: Clock, deadline_s: float
) -> Exchange:
    """Inference.Generate; the deadline is the client's own."""
    exchange = new_exchange(ask, manner, clock)
    call = InferenceStub(channel).Generate(ask.message(model), timeout=manner.deadline_s or deadline_s)
    try:
        async with asyncio.timeout(manner.leaves_after_s):
            await _read_grpc(exchange, call, clock)
            exchange.end = End.OK
    except TimeoutError:
        exchange.end = End.LEFT
    except grpc.aio.AioRpcError as error:
        exchange.end = _grpc_end(error, manner, begun=bool(exchange.arrivals))
        exchange.detail = f"{error.code().name}: {error.details()}"
    finally:
        call.cancel()
    return exchange


async def get(url: str, path: str, within_s: float = 3.0) -> bytes:
    """The body of a router's own page. Raises OSError or TimeoutError when it does not answer, ValueError for half."""
    parts = urlsplit(url)
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n\r\n".encode())
            raw = await reader.read(-1)
        finally:
            writer.transport.abort()
    _, headers, body = _split(raw)
    text, whole = _body(headers, body)
    if not whole:
        raise ValueError(f"half an answer from {url}{path}")
    return text


async def get_json(url: str, path: str, within_s: float = 3.0) -> Json:
    """The same, parsed."""
    return cast("Json", json.loads(await get(url, path, within_s)))


def _post(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\nx-headrace-trace: 1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _read_http(exchange: Exchange, received: list[tuple[float, bytes]], manner: Manner) -> None:
    status, headers, raw = _split(b"".join(data for _, data in received))
    body, whole = _body(headers, raw)
    if status == 200 and manner.stream:
        exchange.arrivals = [at for at, data in received if b"data: {" in data]
        _read_events(exchange, body, whole)
    elif status == 200 and whole:
        _read_whole(exchange, headers, json.loads(body))
    elif status in (429, 503) and whole:
        exchange.end, exchange.detail = End.BUSY, f"{status} {body.decode(errors='replace')[:300]}"
        with contextlib.suppress(ValueError):
            exchange.retry_after_s = float(headers.get("retry-after", "0.5"))
    elif status and status != 200 and whole:
        exchange.end, exchange.detail = End.FAILED, f"{status} {body.decode(errors='replace')[:300]}"
    elif exchange.end is not End.LEFT:
        exchange.detail = exchange.detail or ("cut short" if received else "no answer")


def _read_whole(exchange: Exchange, headers: dict[str, str], said: Json) -> None:
    choices = cast("list[Json]", said["choices"])
    for choice in choices:
        index = cast("int", choice["index"])
        exchange.texts[index], exchange.reasons[index] = str(choice["text"]), str(choice["finish_reason"])
        exchange.logprobs[index] = _logprobs(choice)
    exchange.completion_tokens = cast("dict[str, int]", said["usage"])["completion_tokens"]
    exchange.attempts = int(headers.get("x-headrace-attempts", "0"))
    exchange.end = End.OK


def _read_events(exchange: Exchange, body: bytes, whole: bool) -> None:
    parts = body.split(b"\n\n")[:-1]  # the last one is not complete
    done = False
    for line in (line for part in parts for line in part.split(b"\n")):
        if line.startswith(b": x-headrace-attempts: "):
            exchange.attempts = int(line.rpartition(b" ")[2])
        elif line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data: "):
            _read_chunk(exchange, json.loads(line.removeprefix(b"data: ")))
    if done and whole and exchange.end is not End.FAILED:
        exchange.end = End.OK
    elif exchange.end is End.BROKEN:
        exchange.detail = "the stream was cut short"


def _read_chunk(exchange: Exchange, chunk: Json) -> None:
    if "error" in chunk:
        exchange.end, exchange.detail = End.FAILED, f"after headers: {chunk['error']}"
        return
    for choice in cast("list[Json]", chunk.get("choices") or []):
        index = cast("int", choice["index"])
        exchange.texts[index] += str(choice["text"])
        exchange.logprobs[index] += _logprobs(choice)
        if choice["finish_reason"]:
            exchange.reasons[index] = str(choice["finish_reason"])
    if usage := chunk.get("usage"):
        exchange.completion_tokens = cast("dict[str, int]", usage)["completion_tokens"]


def _logprobs(choice: Json) -> list[float]:
    told = cast("dict[str, list[float]] | None", choice.get("logprobs"))
    return [] if told is None else told["token_logprobs"]


async def _read_grpc(
    exchange: Exchange, call: "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]", clock: Clock
) -> None:
    assert exchange.tokens is not None
    async for response in call:
        if response.HasField("delta"):
            event = response.delta
            exchange.texts[event.index] += event.text
            exchange.tokens[event.index] += event.token_ids
            exchange.logprobs[event.index] += [each.logprob for each in event.logprobs]
            if event.token_ids:
                exchange.arrivals.append(clock.now())
        elif response.HasField("finish"):
            exchange.reasons[response.finish.index] = response.finish.reason
        else:
            exchange.attempts = response.summary.attempts
            exchange.completion_tokens = response.summary.completion_tokens


def _grpc_end(error: grpc.aio.AioRpcError, manner: Manner, *, begun: bool) -> End:
    """`begun`: tokens have come already; then nothing is a reason to ask again."""
    code, details = error.code(), error.details() or ""
    if begun and code is grpc.StatusCode.UNAVAILABLE:
        return End.BROKEN
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return End.FAILED if begun else End.BUSY
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and manner.deadline_s is not None:
        return End.LATE
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
        return End.UNREACHABLE
    if code is grpc.StatusCode.UNAVAILABLE:
        # gRPC's own words for a lost connection; ours for a cluster that cannot serve are the only other ones
        broken = any(word in details.lower() for word in ("socket", "connect", "goaway", "stream removed", "eof"))
        return End.BROKEN if broken else End.BUSY
    return End.BROKEN if code is grpc.StatusCode.CANCELLED else End.FAILED


def _split(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status (0: not even headers), headers, and what follows them."""
    head, blank, rest = raw.partition(b"\r\n\r\n")
    if not blank:
        return 0, {}, b""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, rest


def _body(headers: dict[str, str], raw: bytes) -> tuple[bytes, bool]:
    """The body as far as it came, and whether it ended as HTTP says it must."""
    if headers.get("transfer-encoding") != "chunked":
        return raw, len(raw) == int(headers.get("content-length", "-1"))
    body = bytearray()
    while True:
        size, line_end, rest = raw.partition(b"\r\n")
        if not line_end:
            return bytes(body), False
        length = int(size, 16)
        if length == 0:
            return bytes(body), rest == b"\r\n"
        body += rest[:length]
        if len(rest) < length + 2:
            return bytes(body), False
        raw = rest[length + 2 :]
