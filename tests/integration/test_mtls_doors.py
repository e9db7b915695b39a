"""mTLS at a router's doors, as it makes them: those for clients ask for a certificate, the admin port does not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.config import ClusterConfig
from cluster.rpc import channel
from cluster.tls import Believed, CertificateFiles, ClientTls, NamedTls
from router.front.http_app import make_app
from router.server import doors
from tests.certificates import Authority, Files, files
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import make_front
from tests.integration.stack import config

WITHIN_S = 10.0
OURS, THEIRS = Authority(), Authority()


@dataclass(frozen=True, slots=True)
class Doors:
    """Where they are, and what a client needs: whom to believe, and the certificate that they ask for."""

    http: str
    admin: str
    grpc: str
    client: Files

    async def answers(self, url: str, shown: Files | None) -> bool:
        """Whether a request is answered; one that is not was refused as the connection came about."""
        believed = ssl.create_default_context(cafile=self.client.ca)
        if shown is not None:
            believed.load_cert_chain(shown.cert, shown.key)
        try:
            async with httpx.AsyncClient(verify=believed, timeout=WITHIN_S) as client:
                return (await client.get(f"{url}/health")).status_code == 200
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            return False

    async def is_served(self, shown: Files | None) -> bool:
        """The same over gRPC."""
        tls: ClientTls = Believed(self.client.ca, None)
        if shown is not None:
            tls = NamedTls(CertificateFiles(shown.cert, shown.key, self.client.ca), None)
        async with channel(self.grpc, tls) as wire:
            call = health_pb2_grpc.HealthStub(wire).Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
            code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


def settings(made: Files) -> ClusterConfig:
    public = {"cert_file": made.cert, "key_file": made.key, "client_ca_file": made.ca}
    return config(tls={"public": public}, router={"admin_port": 0})


@contextlib.asynccontextmanager
async def open_doors(folder: Path) -> AsyncIterator[Doors]:
    dispatcher = FakeDispatcher(say("ok"))
    front = make_front(dispatcher)
    asked = settings(files(folder / "doors", OURS, "127.0.0.1"))
    rpc, http, admin = doors(asked, front, make_app(front, dispatcher, None))
    await rpc.start()
    serving = asyncio.gather(http.run_here(), admin.run_here())
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(http.listening.wait(), admin.listening.wait())
    try:
        yield Doors(http.url, admin.url, rpc.address, files(folder / "client", OURS, "client"))
    finally:
        http.should_exit = admin.should_exit = True
        await serving
        await rpc.stop(0)
        await front.text.grammars.close()


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Doors]:
    async with open_doors(tmp_path) as made:
        yield made


async def test_clients_need_a_certificate_and_probes_do_not(at: Doors, tmp_path: Path) -> None:
    stranger = files(tmp_path / "stranger", THEIRS, "client")
    assert await at.answers(at.http, at.client)
    assert await at.is_served(at.client)
    for shown in (None, stranger):
        assert not await at.answers(at.http, shown)
        assert not await at.is_served(shown)
    assert await at.answers(at.admin, None)
