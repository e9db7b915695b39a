"""TLS of both kinds of servers on real sockets: who gets in, and that certificates change while calls run."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cli.start import wait_until_served
from cluster.controller import ClusterStatus
from cluster.core.access import PublicTlsSettings
from cluster.credentials import Credentials
from cluster.pipe import Ready
from cluster.rpc import channel, make_server
from cluster.supervisor import ProgramStatus
from cluster.tls import CertificateFiles, NamedTls, web_context
from tests.certificates import Authority, Files, files

SECRET = "0123456789abcdef"
NAME = "headrace"


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def theirs() -> Authority:
    return Authority()


def named(made: Files) -> NamedTls:
    return NamedTls(CertificateFiles(made.cert, made.key, made.ca), NAME)


async def is_served(address: str, tls: NamedTls | None) -> bool:
    """Whether a new connection comes about."""
    async with channel(address, tls) as wire:
        call = health_pb2_grpc.HealthStub(wire).Check(health_pb2.HealthCheckRequest(), timeout=5)
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_internal_streams_need_a_certificate_of_the_cluster_on_both_sides(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    member = named(files(tmp_path / "member", ours, NAME))
    server = make_server("127.0.0.1", 0, [], Credentials(SECRET, member))
    await server.start()
    outsider = named(files(tmp_path / "outsider", theirs, NAME, believed=ours.pem))
    suspicious = named(files(tmp_path / "suspicious", ours, NAME, believed=theirs.pem))
    renamed = NamedTls(member.files, "somebody-else")
    assert await is_served(server.address, member)
    for stranger in (outsider, suspicious, renamed, None):
        assert not await is_served(server.address, stranger)
    await server.stop(0)


async def test_grpc_certificates_change_under_a_running_server(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    """From one CA to the next: both are believed, then certificates change, then the old CA goes."""
    both = ours.pem + theirs.pem
    made = files(tmp_path / "server", ours, NAME)
    server = make_server("127.0.0.1", 0, [], Credentials(SECRET, named(made)))
    await server.start()
    old, new = files(tmp_path / "old", ours, NAME), files(tmp_path / "new", theirs, NAME)
    async with channel(server.address, named(old)) as kept:
        stub = health_pb2_grpc.HealthStub(kept)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert not await is_served(server.address, named(new))
        files(made.folder, theirs, NAME, believed=both)
        assert await is_served(server.address, named(files(tmp_path / "old", ours, NAME, believed=both)))
        assert await is_served(server.address, named(new))
        files(made.folder, theirs, NAME)
        assert not await is_served(server.address, named(old))
        assert await is_served(server.address, named(new))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)  # the connection that was there goes on
    await server.stop(0)


@contextlib.asynccontextmanager
async def website(certificates: CertificateFiles) -> AsyncIterator[int]:
    async def app(_: object, receive: object, send: object) -> None:
        assert callable(send)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(
        app, log_level="error", lifespan="off", ssl_context_factory=lambda *_: web_context(certificates)
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    await server.shutdown()


async def meets(port: int, believed: bytes, client: Files | None = None, name: str | None = None) -> bytes | None:
    """The certificate that a new HTTPS connection is shown, None when it does not come about."""
    context = ssl.create_default_context(cadata=believed.decode())
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name or "127.0.0.1"
        )
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
    except (ssl.SSLError, ConnectionError):
        return None
    connection = writer.get_extra_info("ssl_object")
    writer.close()
    shown = connection.getpeercert(binary_form=True)
    assert isinstance(shown, bytes)
    return shown if answer.startswith(b"HTTP/1.1 200") else None


async def test_https_certificates_change_under_a_running_server(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    made = files(tmp_path / "web", ours, "127.0.0.1", NAME)
    async with website(CertificateFiles(made.cert, made.key, None)) as port:
        first = await meets(port, ours.pem)
        assert first is not None
        assert await meets(port, ours.pem, name=NAME) == first
        assert await meets(port, theirs.pem) is None
        files(made.folder, theirs, "127.0.0.1")
        assert await meets(port, ours.pem) is None
        second = await meets(port, theirs.pem)
        assert second not in (None, first)


async def test_https_with_certificates_of_clients(tmp_path: Path, ours: Authority, theirs: Authority) -> None:
    made = files(tmp_path / "web", ours, "127.0.0.1")
    known, unknown = files(tmp_path / "known", ours, "client"), files(tmp_path / "unknown", theirs, "client")
    async with website(CertificateFiles(made.cert, made.key, made.ca)) as port:
        assert await meets(port, ours.pem, known) is not None
        assert await meets(port, ours.pem, unknown) is None
        assert await meets(port, ours.pem) is None
        files(made.folder, ours, "127.0.0.1", believed=theirs.pem)
        assert await meets(port, ours.pem, unknown) is not None, "the CA changes too"
        assert await meets(port, ours.pem, known) is None


async def test_who_starts_a_cluster_is_told_at_once_that_its_certificate_is_not_believed(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    """And does not wait for what trying again cannot change."""
    made = files(tmp_path / "web", ours, "127.0.0.1")
    other = files(tmp_path / "other", theirs, "127.0.0.1")
    patience_s = 3600.0
    async with website(CertificateFiles(made.cert, made.key, None)) as port:
        ready = Ready(name="router-0", role="router", address="", epoch=1, http=f"https://127.0.0.1:{port}")
        router = ProgramStatus("router-0", "router", 1, 1, "ready", ready, 7)
        status = ClusterStatus(1, {"decode": 1, "router": 1}, (router,), ())
        for ca_file, name, words in (
            (made.ca, None, None),
            (other.ca, None, "unable to get local issuer certificate"),
            (made.ca, "elsewhere", "elsewhere"),
        ):
            tls = PublicTlsSettings(ca_file=ca_file, server_name=name)
            told = await asyncio.to_thread(wait_until_served, status, patience_s, tls)
            assert (words is None) == (told == {})
            assert words is None or words in told["router-0"]
