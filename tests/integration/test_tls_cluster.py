"""A whole cluster with TLS on every wire of ours, whose CA is exchanged while clients ask: nobody notices.

Each request opens a connection of its own, and a worker that starts when only the new CA is left is met, used and
linked: so every kind of handshake happens under every state of the files.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest

from cluster.cli.ask import AskFailed, Question, ask
from cluster.cli.reach import asked_tls, grpc_tls
from cluster.cli.web import NoAnswer, get
from cluster.core.config import ClusterConfig
from cluster.local import LocalCluster
from cluster.rpc import channel
from cluster.stubs.inference_pb2_grpc import InferenceStub
from cluster.tls import CertificateFiles, NamedTls, named_tls
from tests.certificates import Authority, Files, files
from tests.integration.asks import Ask
from tests.integration.stack import config, until

CLIENTS = 3
WITHIN_S = 30.0
OLD, NEW = Authority(), Authority()
BOTH = OLD.pem + NEW.pem


@dataclass(frozen=True, slots=True)
class Running:
    """`doors` and `inside`: the files of the routers' certificates, and of everybody's."""

    cluster: LocalCluster
    doors: Files
    inside: Files

    async def workers(self) -> list[str]:
        """Those that are ready, as the router says it at its admin port, whoever has signed its certificate."""
        async with httpx.AsyncClient(verify=believing(BOTH)) as client:
            told = (await client.get(f"{self.cluster.admin_url}/status")).json()
        return sorted(worker["worker"] for worker in told["workers"] if worker["state"] == "ready")

    async def sees(self, *names: str) -> None:
        async def all_there() -> bool:
            return await self.workers() == sorted(names)

        assert await until(all_there, WITHIN_S), await self.workers()


def believing(pem: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=pem.decode())


def settings(doors: Files, inside: Files) -> ClusterConfig:
    tls = {
        "public": {"cert_file": doors.cert, "key_file": doors.key, "ca_file": doors.ca},
        "internal": {"cert_file": inside.cert, "key_file": inside.key, "ca_file": inside.ca},
    }
    return config(prefill=1, decode=1, tls=tls, timing={"heartbeat_s": 0.2})


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    doors, inside = files(tmp_path / "doors", OLD, "127.0.0.1"), files(tmp_path / "inside", OLD, "headrace")
    with LocalCluster(settings(doors, inside), tmp_path / "cluster") as cluster:
        cluster.wait_ready()
        yield Running(cluster, doors, inside)


async def over_https(running: Running, number: int, believed: bytes) -> str:
    """A whole answer, "" when no connection came about."""
    wanted = Ask((number % 200, *range(99)), 12, stream=False)
    try:
        async with httpx.AsyncClient(verify=believing(believed), timeout=WITHIN_S) as client:
            answer = await client.post(f"{running.cluster.url}/v1/completions", json=wanted.body())
    except httpx.ConnectError:
        return ""
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == wanted.texts()
    return "right"


async def over_grpc(running: Running, number: int, believed: Files) -> None:
    wanted = Ask((number % 200, *range(99)), 12)
    tls = NamedTls(CertificateFiles(believed.cert, believed.key, believed.ca), None)
    tokens: list[int] = []
    async with channel(running.cluster.grpc_address, tls) as wire:
        async for event in InferenceStub(wire).Generate(wanted.message(), timeout=WITHIN_S):
            tokens += event.delta.token_ids
    assert tokens == wanted.right[0][0]


@dataclass
class Load:
    """Clients that ask until `stop`, and believe both CAs, as those of an operator who changes one."""

    running: Running
    believed: Files
    stop: asyncio.Event
    asked: int = 0

    async def client(self) -> None:
        while not self.stop.is_set():
            self.asked += 1
            if self.asked % 2:
                assert await over_https(self.running, self.asked, BOTH) == "right"
            else:
                await over_grpc(self.running, self.asked, self.believed)

    async def goes_on(self) -> None:
        """Until every client has asked anew."""
        goal = self.asked + 2 * CLIENTS

        async def reached() -> bool:
            return self.asked >= goal

        assert await until(reached, WITHIN_S)


async def test_everything_of_ours_speaks_tls_and_our_own_commands_do(running: Running, tmp_path: Path) -> None:
    await running.sees("decode-0", "prefill-0")
    assert running.cluster.url.startswith("https://")
    assert await over_https(running, 1, OLD.pem) == "right"
    assert await over_https(running, 1, NEW.pem) == ""
    tls = running.cluster.config.tls.public
    for url in (running.cluster.url, running.cluster.admin_url):
        assert (await asyncio.to_thread(get, f"{url}/ready", tls, within_s=WITHIN_S))[0] == 200
        with pytest.raises(NoAnswer):
            await asyncio.to_thread(get, f"{url.replace('https', 'http')}/ready", tls, within_s=WITHIN_S)
    pieces: list[str] = []
    question = Question("hello", raw=True, max_tokens=3)
    await asyncio.to_thread(ask, question, running.cluster.grpc_address, pieces.append, named_tls(tls))
    assert pieces
    address = running.cluster.grpc_address
    with pytest.raises(AskFailed):
        await asyncio.to_thread(ask, question, address, pieces.append)
    for believed, answers in ((OLD, True), (NEW, False)):  # what `generate --address ... --ca-file` does elsewhere
        asked = asked_tls(Path(files(tmp_path / "elsewhere", believed, "nobody").ca))
        assert asked is not None
        asking = asyncio.to_thread(ask, question, address, pieces.append, grpc_tls(asked, encrypted=True))
        if answers:
            await asking
        else:
            with pytest.raises(AskFailed):
                await asking
    async with channel(running.cluster.ready("decode-0").address) as wire:  # plain, at an internal port
        with pytest.raises(grpc.aio.AioRpcError):
            await wire.unary_unary("/grpc.health.v1.Health/Check", None, None)(b"", timeout=WITHIN_S)


@pytest.mark.verify
async def test_a_ca_is_exchanged_under_load(running: Running, tmp_path: Path) -> None:
    await running.sees("decode-0", "prefill-0")
    load = Load(running, files(tmp_path / "client", OLD, "client", believed=BOTH), asyncio.Event())
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(load.client())
        await load.goes_on()
        for authority, believed in ((OLD, BOTH), (NEW, BOTH), (NEW, NEW.pem)):
            files(running.doors.folder, authority, "127.0.0.1", believed=believed)
            files(running.inside.folder, authority, "headrace", believed=believed)
            await load.goes_on()
        running.cluster.start("decode-1")
        await running.sees("decode-0", "decode-1", "prefill-0")
        await load.goes_on()
        assert await over_https(running, 1, NEW.pem) == "right"
        assert await over_https(running, 1, OLD.pem) == ""
        load.stop.set()
