"""The real stack for tests: LocalCluster with the tracer model, what its router says of it, and a plain HTTP client.

The client is raw asyncio because these tests are about connections: it sends what no library would send, leaves where
it wants to, and says whether an answer was whole or cut short.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.core.clock import SystemClock
from cluster.core.config import ClusterConfig
from cluster.local import LocalCluster
from engine.messages import TracerModel
from router.web import ADMIN

CLOCK = SystemClock()
SPEC = TracerModel(vocab_size=300)  # the end token is 299, so one token in 300 is one
BLOCK = 16
MODEL = "tracer"
LOOK_S = 0.05  # between two looks at the router's status

Json = dict[str, Any]


def config(*, prefill: int = 2, decode: int = 2, step_s: float = 0.002, **groups: Json) -> ClusterConfig:
    """Small pools and slots, so that a few dozen requests meet every limit. `groups` are merged in."""
    values: Json = {
        "model": "tracer",
        "pools": {
            "prefill": {"replicas": prefill, "pool_tokens": 96 * BLOCK},
            "decode": {"replicas": decode, "pool_tokens": 44 * BLOCK},
        },
        "engine": {
            "block_size": BLOCK,
            "chunk_tokens": 64,
            "max_batch": 16,
            "max_context": 512,
            "poison": True,
            "tracer": {"vocab_size": SPEC.vocab_size, "max_context": 512, "step_s": step_s},
        },
        "handoff": {"slots": 8, "slot_bytes": 8192, "admission_window_tokens": 512},
        "router": {
            "http_port": 0,
            "grpc_port": 0,
            "deadline_s": 30.0,
            "local_max_tokens": BLOCK,
            "policy": "least_loaded",
        },
    }
    for group, changes in groups.items():
        values[group] = {**values.get(group, {}), **changes}
    return ClusterConfig.model_validate(values)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back. `whole`: the body ended as HTTP says it must; status 0: not even headers came."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    def events(self) -> list[str]:
        """The data of every server-sent event that came completely."""
        text = self.body.decode()
        return [part.removeprefix("data: ") for part in text.split("\n\n")[:-1] if part.startswith("data: ")]


@dataclass(slots=True)
class Connection:
    """One HTTP/1.1 exchange on a connection of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # an early answer may have closed it; the answer is what counts
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> HttpAnswer:
        """Read to the end of the connection."""
        await self.receive(None)
        return parse_answer(bytes(self.received))

    async def receive(self, enough: int | None) -> None:
        """Read until `enough` bytes are here, or the end."""
        with contextlib.suppress(ConnectionError):
            while (enough is None or len(self.received) < enough) and (data := await self.reader.read(65536)):
                self.received += data

    def say_no_more(self) -> None:
        """Close our half; the answer may still come."""
        with contextlib.suppress(OSError):  # the other end may have hung up already
            self.writer.write_eof()

    def leave(self) -> None:
        """Close without a word, in whatever state: what was not read is thrown away, the peer gets a reset."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[Connection]:
    """A connection to the router's HTTP door, gone when the context is left."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    connection = Connection(reader, writer)
    try:
        yield connection
    finally:
        connection.leave()


def request_head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


def post_bytes(path: str, body: bytes, **headers: str) -> bytes:
    """A whole POST request."""
    return (
        request_head("POST", path, {"content-type": "application/json", "content-length": str(len(body)), **headers})
        + body
    )


def parse_answer(raw: bytes) -> HttpAnswer:
    head, blank, rest = raw.partition(b"\r\n\r\n")
    if not blank:
        return HttpAnswer(0, {}, b"", whole=False)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1])
    if headers.get("transfer-encoding") == "chunked":
        body, whole = _dechunk(rest)
    else:
        body, whole = rest, len(rest) == int(headers.get("content-length", "-1"))
    return HttpAnswer(status, headers, body, whole)


def _dechunk(raw: bytes) -> tuple[bytes, bool]:
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


class Stack:
    """A running cluster, as tests look at it. `key`: an operator's, where tenants are configured."""

    def __init__(self, cluster: LocalCluster, key: str | None = None) -> None:
        self.cluster = cluster
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def admin_url(self) -> str:
        """Where /metrics and /status are."""
        return self.cluster.admin_url

    @property
    def headers(self) -> dict[str, str]:
        """What every request must bring."""
        return self._headers

    async def call(self, raw: bytes, *, within_s: float = 10.0, admin: bool = False) -> HttpAnswer:
        """Send bytes to the HTTP door, or to that of operators; return what comes back until the connection ends."""
        async with asyncio.timeout(within_s), connect(self.admin_url if admin else self.url) as connection:
            await connection.send(raw)
            return await connection.answer()

    async def get(self, path: str) -> HttpAnswer:
        return await self.call(request_head("GET", path, self._headers), admin=path in ADMIN)

    async def post(self, path: str, body: Json, *, within_s: float = 30.0) -> HttpAnswer:
        return await self.call(post_bytes(path, json.dumps(body).encode(), **self._headers), within_s=within_s)

    async def status(self) -> Json:
        return (await self.get("/status")).json

    def pids(self) -> dict[str, tuple[int, ...]]:
        """Every process of every program: server first, then engine."""
        return {name: self.cluster.ready(name).pids for name in self.cluster.names}

    async def in_use(self) -> dict[str, int]:
        """Every gauge of the router and of all its workers that is not 0, and what is not as it should be."""
        status = await self.status()
        metrics = (await self.get("/metrics")).body.decode()
        flight = next(line for line in metrics.splitlines() if line.startswith("headrace_requests_in_flight "))
        used = {"router requests_in_flight": int(float(flight.split()[1]))}
        used |= {f"router {name}": value for name, value in status["gauges"].items()}
        for worker in status["workers"]:
            used |= {f"{worker['worker']} {name}": value for name, value in worker["gauges"].items()}
            used[f"{worker['worker']} attempts"] = worker["attempts"]
            used[f"{worker['worker']} is {worker['state']}"] = int(worker["state"] != "ready")
        programs = [name for name in self.cluster.names if not name.startswith("router")]
        assert len(status["workers"]) == len(programs), status["workers"]
        return {name: value for name, value in used.items() if value}

    async def quiet(self, within_s: float = 2.0) -> None:
        """Until nothing is in use anywhere (I2). Fails naming what still is."""
        left: dict[str, int] = {}

        async def looks_quiet() -> bool:
            left.clear()
            left.update(await self.in_use())
            return not left

        assert await until(looks_quiet, within_s), f"{within_s:g} s after the traffic: {left}"

    async def all_ready(self, within_s: float = 30.0) -> None:
        """Until every program runs and the router sees every worker as ready."""
        await asyncio.to_thread(self.cluster.wait_ready, within_s)

        async def seen() -> bool:
            workers = (await self.status())["workers"]
            programs = [self.cluster.status(name) for name in self.cluster.names if not name.startswith("router")]
            expected = {(p.ready.address, "ready") for p in programs if p is not None and p.ready is not None}
            return {(w["address"], w["state"]) for w in workers} == expected and len(expected) == len(programs)

        assert await until(seen, within_s), await self.status()

    async def counters(self) -> dict[str, int]:
        """The router's own counters and the sums over its workers, by name."""
        status = await self.status()
        total: dict[str, int] = dict(status["counters"])
        for worker in status["workers"]:
            for name, value in worker["counters"].items():
                total[name] = total.get(name, 0) + value
        return total


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Look at `condition` every LOOK_S until it holds. False when time ran out."""
    give_up = CLOCK.now() + within_s
    while not await condition():
        if CLOCK.now() > give_up:
            return False
        await pause(LOOK_S)
    return True


async def pause(seconds: float) -> None:
    """What a polite client does between two tries. Never to wait for something that could be looked at."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


@contextlib.contextmanager
def stack(settings: ClusterConfig, folder: Path, key: str | None = None) -> Iterator[Stack]:
    """A cluster that is ready; its logs are in `folder`."""
    with LocalCluster(settings, folder) as cluster:
        running = Stack(cluster, key)
        cluster.wait_ready()
        asyncio.run(running.all_ready())
        yield running
