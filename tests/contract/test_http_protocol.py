"""Bounds on connections and heads, on real sockets: nobody holds a connection without asking for something."""

import asyncio
import contextlib
import io
import logging
import ssl
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvicorn

from cluster.logs import setup_logging
from cluster.tls import CertificateFiles
from router import tls_listener
from router.front import http_protocol
from router.front.http_protocol import MAX_HEAD_BYTES, BoundedHttp, bounded
from router.web import WebServer, listen
from tests.certificates import Authority, files

WITHIN_S = 10.0
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


OFFER = (
    b"POST /echo HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\ncontent-length: 11\r\n\r\n\r\nupgrade: "
)
"""As Java's client asks, for which it has to be asked not to."""


class Website:
    """Answers "ok"; the answer to /slow ends when `release` is set; that to /echo is what was said."""

    server: WebServer

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.port = 0

    async def app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/echo":
            said, more = b"", True
            while more:
                message = await receive()
                said, more = said + message["body"], message["more_body"]
            headers = [(b"content-length", b"%d" % len(said))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": said})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await self.release.wait()
            await send({"type": "http.response.body", "body": b"k"})
        else:
            await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def website(max_connections: int = 100, protocol: type[asyncio.Protocol] | None = None) -> AsyncIterator[Website]:
    site = Website()
    config = uvicorn.Config(
        site.app,
        port=0,
        log_level="error",
        lifespan="off",
        interface="asgi3",
        http=protocol or bounded(max_connections),
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    site.port = server.servers[0].sockets[0].getsockname()[1]
    yield site
    site.release.set()
    await server.shutdown()


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def says(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def hears(self, ending: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(ending), WITHIN_S)

    async def rest(self) -> bytes:
        """Up to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), WITHIN_S)
        return b""


@contextlib.asynccontextmanager
async def line(site: Website) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    yield Line(reader, writer)
    writer.transport.abort()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("said", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-", REQUEST[:-2]])
async def test_a_head_that_does_not_end_ends_its_connection(said: bytes) -> None:
    async with website() as site, line(site) as slow:
        await slow.says(said)
        assert await slow.rest() == b""


@pytest.mark.usefixtures("hasty")
async def test_byte_by_byte_is_no_way_round_it() -> None:
    async with website() as site, line(site) as slow:
        ended = asyncio.ensure_future(slow.rest())
        async with asyncio.timeout(WITHIN_S):
            while not ended.done():
                await slow.says(b"x")
                await asyncio.wait({ended}, timeout=0.02)
        assert await ended in (b"", b"HTTP/1.1 400 Bad Request\r\n") or b"400" in await ended


@pytest.mark.usefixtures("hasty")
async def test_the_next_head_on_a_connection_is_bounded_too_but_an_answer_goes_on() -> None:
    async with website() as site, line(site) as one:
        await one.says(REQUEST)
        assert (await one.hears(b"ok")).startswith(b"HTTP/1.1 200")
        await one.says(REQUEST.replace(b"/", b"/slow", 1) + REQUEST[:10])  # half of the next one, while it is answered
        await one.hears(b"\r\n\r\no")
        later = asyncio.get_running_loop().time() + 5 * http_protocol.HEAD_S
        reached = asyncio.Event()
        asyncio.get_running_loop().call_at(later, reached.set)
        await reached.wait()
        assert not one.reader.at_eof()
        site.release.set()
        assert await one.rest() == b"k"


async def test_a_head_that_is_too_large_is_refused() -> None:
    async with website() as site, line(site) as one:
        await one.says(REQUEST[:-2] + b"x-filling: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert b"too large" in await one.rest()


@pytest.mark.parametrize("cut", [30, OFFER.index(b"\r\n\r\n"), len(OFFER)])
async def test_who_offers_another_protocol_is_answered_in_this_one(cut: int) -> None:
    """With its body, which is not the other protocol's; and so is the next request on that connection."""
    async with website() as site, line(site) as one:
        for _ in range(2):
            await one.says(OFFER[:cut])
            await one.says(OFFER[cut:])
            assert (await one.hears(b"upgrade: ")).endswith(b"content-length: 11\r\n\r\n\r\nupgrade: ")


ANSWER = b"content-length: 11\r\n\r\n\r\nupgrade: "
HEAD = OFFER.index(b"\r\n\r\n") + 4


class Told(BoundedHttp):
    """Tells what each read brought, once it is taken."""

    reads: ClassVar[asyncio.Queue[bytes]]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.reads.put_nowait(data)


@contextlib.asynccontextmanager
async def told() -> AsyncIterator[Line]:
    """A line whose reads are told."""
    Told.reads = asyncio.Queue()
    async with website(protocol=Told) as site, line(site) as one:
        yield one


async def in_reads(one: Line, *parts: bytes) -> None:
    """Says these parts, each of which comes in a read of its own."""
    for part in filter(None, parts):
        await one.says(part)
        assert await asyncio.wait_for(Told.reads.get(), WITHIN_S) == part


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
async def test_wherever_a_read_ends_an_offer_is_seen(name: bytes) -> None:
    offer = OFFER.replace(b"Upgrade:", name + b":", 1)
    async with told() as one:
        for cut in range(1, HEAD + 1):
            await in_reads(one, offer[:cut], offer[cut:])
            assert (await one.hears(b"upgrade: ")).endswith(ANSWER), cut


async def test_so_is_one_in_a_head_that_comes_with_the_end_of_the_body_before_it() -> None:
    async with told() as one:
        for cut in range(0, HEAD + 1):
            await in_reads(one, OFFER[:-3], OFFER[-3:] + OFFER[:cut], OFFER[cut:])
            for _ in range(2):
                assert (await one.hears(b"upgrade: ")).endswith(ANSWER), cut


async def test_and_one_that_comes_byte_by_byte_or_with_many_others() -> None:
    async with told() as one:
        await in_reads(one, *(OFFER[at : at + 1] for at in range(len(OFFER))))
        assert (await one.hears(b"upgrade: ")).endswith(ANSWER)
        await in_reads(one, 5 * OFFER)
        for _ in range(5):
            assert (await one.hears(b"upgrade: ")).endswith(ANSWER)


async def test_a_body_is_not_touched_wherever_a_read_ends() -> None:
    """It may look like an offer, in chunks as well; and a header may begin like one and be another."""
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nUpgrade-Insecure-Requests: 1\r\n"
    body = b"a\r\nUpgrade: h2c\r\n\r\nupgrade:x"
    plain = head + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    async with told() as one:
        for said in (plain, chunked):
            for cut in range(1, len(said)):
                await in_reads(one, said[:cut], said[cut:])
                answer = await one.hears(b"upgrade:x")
                assert answer.endswith(b"content-length: %d\r\n\r\n" % len(body) + body), cut


async def test_who_comes_when_all_places_are_taken_is_told_and_the_others_are_served() -> None:
    async with website(2) as site, line(site) as one, line(site) as two:
        for each in (one, two):
            await each.says(REQUEST)
            await each.hears(b"ok")
        async with line(site) as three:
            await three.says(REQUEST)
            told = await three.rest()
        assert told.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in told
        await one.says(REQUEST)
        await one.hears(b"ok")
        one.writer.close()
        await one.rest()
        async with line(site) as three:
            await three.says(REQUEST)
            assert (await three.hears(b"ok")).startswith(b"HTTP/1.1 200")


@contextlib.asynccontextmanager
async def encrypted(folder: Path, max_connections: int) -> AsyncIterator[tuple[Website, ssl.SSLContext]]:
    """A website as a router's doors are, and what a client needs to believe it."""
    authority = Authority()
    made = files(folder, authority, "127.0.0.1")
    site = Website()
    tls = CertificateFiles(made.cert, made.key, None)
    server = WebServer(site.app, [listen("127.0.0.1", 0, "x")], tls=tls, drain_s=1.0, max_connections=max_connections)
    serving = asyncio.create_task(server.run_here())
    await asyncio.wait_for(server.listening.wait(), WITHIN_S)
    site.port, site.server = int(server.url.rpartition(":")[2]), server
    yield site, ssl.create_default_context(cadata=authority.pem.decode())
    site.release.set()
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def encrypted_line(site: Website, believed: ssl.SSLContext) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=believed)
    yield Line(reader, writer)
    writer.transport.abort()


async def test_under_tls_silent_connections_are_counted_and_end_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who only connect take no more places than there are, and have seconds for the handshake."""
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 1.0)
    places = 3 + tls_listener.TOLD
    async with encrypted(tmp_path, 3) as (site, believed), contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(line(site)) for _ in range(4 * places)]
        ends = [asyncio.ensure_future(each.rest()) for each in silent]
        async with asyncio.timeout(WITHIN_S):
            while sum(end.done() for end in ends) < 3 * places:  # hung up on at once
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            assert {await end for end in ends} == {b""}
        async with encrypted_line(site, believed) as one:
            await one.says(REQUEST)
            assert (await one.hears(b"ok")).startswith(b"HTTP/1.1 200")


async def test_under_tls_a_few_who_find_no_place_are_told_and_the_others_are_served(tmp_path: Path) -> None:
    async with encrypted(tmp_path, 2) as (site, believed), contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(encrypted_line(site, believed)) for _ in range(2)]
        for each in served:
            await each.says(REQUEST)
            await each.hears(b"ok")
        async with encrypted_line(site, believed) as three:
            assert (await three.rest()).startswith(b"HTTP/1.1 503")
        for each in served:
            await each.says(REQUEST)
            await each.hears(b"ok")
        served[0].writer.close()
        await served[0].rest()
        async with encrypted_line(site, believed) as three:
            await three.says(REQUEST)
            assert (await three.hears(b"ok")).startswith(b"HTTP/1.1 200")


async def test_under_tls_an_answer_that_runs_ends_while_nobody_new_is_let_in(tmp_path: Path) -> None:
    """So does a handshake that has begun; then its connection ends with the server."""
    async with encrypted(tmp_path, 9) as (site, believed), encrypted_line(site, believed) as one:
        await one.says(REQUEST.replace(b"/", b"/slow", 1))
        await one.hears(b"\r\n\r\no")
        async with line(site) as silent:
            site.server.stop_listening()
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", site.port)
            site.release.set()
            assert await one.hears(b"k") == b"k"
            site.server.should_exit = True
            assert await silent.rest() == b""


async def test_an_error_in_the_app_is_logged_without_what_it_says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS O08: whoever raises may quote a prompt. uvicorn's own log would show it."""

    async def broken(_: object, __: object, ___: object) -> None:
        raise ValueError("Zwetschgenknoedel")

    uvicorns = logging.getLogger("uvicorn")  # as it is in a router, where nobody else has configured it
    monkeypatch.setattr(uvicorns, "propagate", True)
    monkeypatch.setattr(uvicorns, "handlers", [])
    root = logging.getLogger()
    handlers, level, log = root.handlers[:], root.level, io.StringIO()
    setup_logging("router-0", "info", stream=log)
    server = WebServer(broken, [listen("127.0.0.1", 0, "x")], tls=None, drain_s=1.0, max_connections=9)
    serving = asyncio.create_task(server.run_here())
    try:
        await asyncio.wait_for(server.listening.wait(), WITHIN_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        one = Line(reader, writer)
        await one.says(REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert (await one.rest()).startswith(b"HTTP/1.1 500")
        writer.close()
    finally:
        server.should_exit = True
        await serving
        root.handlers[:] = handlers
        root.setLevel(level)
    told = log.getvalue() + "".join(capfd.readouterr())
    assert "Exception in ASGI application" in told
    assert "ValueError" in told
    assert "Zwetschgenknoedel" not in told.replace('raise ValueError("Zwetschgenknoedel")', "")
