"""A streaming HTTP client that costs little: while an answer comes it only stamps and keeps bytes; it parses later.

One connection carries one request at a time and is kept for the next. `parse_answer` is pure.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import orjson

from benchmarks.timeline import Handoff, Timeline
from benchmarks.workloads import Ask
from cluster.core.clock import Clock

_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
Reads = Sequence[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer. `events`: (when its last byte came, line) of each SSE line that is not empty."""

    status: int
    headers: dict[str, str]
    body: bytes
    events: list[tuple[float, bytes]]
    complete: bool


class _Connection(asyncio.Protocol):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reads: list[tuple[float, bytes]] = []
        self._tail = b""
        self._left: int | None = None
        self._done: asyncio.Future[Reads] | None = None
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        first = not self._reads
        self._reads.append((self._clock.now(), data))
        if first:
            self._left = _body_left(data)
        elif self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if (self._left is not None and self._left <= 0) or (self._left is None and self._tail == _LAST_CHUNK):
            self._finish()

    def connection_lost(self, _: Exception | None) -> None:
        self.open = False
        self._finish()

    def ask(self, request: bytes) -> asyncio.Future[Reads]:
        """Send; resolves with every read once the answer is over."""
        assert self._transport is not None
        self._reads, self._tail, self._left = [], b"", None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._reads)


class HttpClient:
    """Sends completions to one server. Use as an async context manager; `label` is the model's name."""

    def __init__(self, base_url: str, label: str, clock: Clock, *, timeout_s: float = 300.0) -> None:
        self._host, _, port = base_url.removeprefix("http://").rstrip("/").rpartition(":")
        self._port = int(port)
        self._label = label
        self._clock = clock
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    async def get(self, path: str) -> Answer:
        """A plain GET. Raises OSError when nobody listens."""
        return parse_answer(await self._send(f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode()))

    async def post(self, path: str, body: bytes) -> Answer:
        """A JSON body, and its answer in one piece. Raises OSError, TimeoutError."""
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        return parse_answer(await self._send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body))

    async def complete(self, prompt: str, max_tokens: int) -> Answer:
        """One completion in one piece. Raises OSError, TimeoutError."""
        body = orjson.dumps({"model": self._label, "prompt": prompt, "max_tokens": max_tokens})
        return await self.post("/v1/completions", body)

    async def stream(self, ask: Ask) -> Timeline:
        """One streamed completion, greedy, of exactly `max_tokens` tokens. Never raises for what the server does."""
        body = orjson.dumps(
            {
                "model": self._label,
                "prompt": ask.prompt,
                "max_tokens": ask.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"x-headrace-trace: 1\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sent = self._clock.now()
        try:
            reads = await self._send(head.encode() + body)
        except (OSError, TimeoutError) as error:
            return Timeline(ask.kind, sent, (), error=type(error).__name__)
        return replace(read_timeline(ask.kind, sent, parse_answer(reads)), ended=reads[-1][0] if reads else 0.0)

    async def _send(self, request: bytes) -> Reads:
        connection = next((c for c in reversed(self._idle) if c.open), None)
        if connection is None:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: _Connection(self._clock), self._host, self._port)
        else:
            self._idle.remove(connection)
        try:
            async with asyncio.timeout(self._timeout_s):
                reads = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        self._idle = [c for c in self._idle if c.open]
        if connection.open:
            self._idle.append(connection)
        return reads


def _body_left(first_read: bytes) -> int | None:
    """Bytes of the body still to come after the first read; None when it is chunked."""
    head, _, body = first_read.partition(b"\r\n\r\n")
    _, found, rest = head.lower().partition(_LENGTH)
    return int(rest.partition(b"\r\n")[0]) - len(body) if found else None


def parse_answer(reads: Reads) -> Answer:
    """Bytes with the times they came to an answer. A cut answer is `complete` False; nothing at all has status 0."""
    raw = b"".join(data for _, data in reads)
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return Answer(0, {}, b"", [], complete=False)
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    code = int(status.split(" ")[1])
    start = len(raw) - len(rest)
    if headers.get("transfer-encoding", "").lower() != "chunked":
        complete = len(rest) >= int(headers.get("content-length", len(rest)))
        return Answer(code, headers, rest, [], complete=complete)
    body, ends, complete = _dechunk(raw, start)
    return Answer(code, headers, body, _events(body, ends, reads), complete=complete)


def _dechunk(raw: bytes, at: int) -> tuple[bytes, list[tuple[int, int]], bool]:
    """The body, (end in the body, end in `raw`) of each chunk, and whether the last chunk came."""
    body = bytearray()
    ends: list[tuple[int, int]] = []
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line_end].partition(b";")[0], 16)
        if size == 0:
            return bytes(body), ends, True
        at = line_end + 2 + size
        body += raw[line_end + 2 : at]
        ends.append((len(body), min(at, len(raw))))
        at += 2
    return bytes(body), ends, False


def _events(body: bytes, ends: list[tuple[int, int]], reads: Reads) -> list[tuple[float, bytes]]:
    arrived: list[int] = []
    for _, data in reads:
        arrived.append((arrived[-1] if arrived else 0) + len(data))
    body_ends = [end for end, _ in ends]
    events: list[tuple[float, bytes]] = []
    at = 0
    while (line_end := body.find(b"\n", at)) >= 0:
        if line := body[at:line_end].strip():
            chunk_end, raw_end = ends[bisect_left(body_ends, line_end + 1)]
            position = raw_end - (chunk_end - line_end - 1)
            events.append((reads[bisect_left(arrived, position)][0], line))
        at = line_end + 1
    return events


def read_timeline(kind: str, sent: float, answer: Answer) -> Timeline:
    """What a streamed completion says. A stream that is cut, or has no usage, is an error."""
    if answer.status != 200:
        why = f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}"
        hint = answer.headers.get("retry-after")
        return Timeline(
            kind, sent, (), error=why, status=answer.status, retry_after=None if hint is None else float(hint)
        )
    chunks: list[float] = []
    usage: dict[str, int] = {}
    trace: dict[str, str] = {}
    error: str | None = None
    done = False
    for came, line in answer.events:
        if line.startswith(b":"):
            name, _, value = line[1:].decode().strip().partition(": ")
            trace[name] = value
        elif line == b"data: [DONE]":
            done = True
        else:
            event = orjson.loads(line.removeprefix(b"data:"))
            error = error or (str(event["error"])[:200] if event.get("error") else None)
            usage = event.get("usage") or usage
            if any(choice.get("text") for choice in event.get("choices", ())):
                chunks.append(came)
    if error is None and not (done and usage and answer.complete):
        error = "the stream was cut"
    prompt, output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    timings = _timings(trace.get("x-headrace-timings-ms", ""))
    return Timeline(kind, sent, tuple(chunks), prompt, output, error, _handoff(trace, timings), timings, answer.status)


def _timings(text: str) -> dict[str, float]:
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {name: float(value) for name, _, value in pairs}


def _handoff(trace: dict[str, str], timings: dict[str, float]) -> Handoff | None:
    if "transfer_wire" not in timings:
        return None
    seconds = {name: value / 1000 for name, value in timings.items()}
    return Handoff(
        kv_bytes=int(trace.get("x-headrace-kv-bytes", "0")),
        offer_wait=seconds["offer_wait"],
        wire=seconds["transfer_wire"],
        verify=seconds["transfer_verify"],
        exposed=seconds["exposed_transfer"],
        prefill=seconds["prefill"],
    )
