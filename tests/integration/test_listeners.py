"""Every socket that listens in a running cluster, and every way in through it (I10; FAULTS S01, S03, S04, O06).

Found by looking, not by a list of ours: what is neither one of our doors nor UCX's fails here, until somebody says
what it is. Ray's sockets are looked at where Ray runs (test_ray_cluster.py).
"""

import asyncio
import contextlib
import os
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.cli.keys import digest_of, new_key
from cluster.core.config import ClusterConfig
from cluster.credentials import Credentials
from cluster.rpc import Metadata, auth_metadata, channel, proof_metadata
from cluster.stubs import inference_pb2, link_pb2, session_pb2, watch_pb2
from router.front.auth import OPEN
from router.web import ADMIN
from tests.integration.inside import assert_unhurt, credentials
from tests.integration.stack import Stack, config, connect, request_head, stack
from tests.integration.test_api_keys import routes
from tests.listening import listening

KEY, MODEST = new_key(), new_key()
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
WITHIN_S = 20.0

Kind = Literal["http", "admin", "public grpc", "internal grpc", "ucx"]
UCX = "engine_process"
"""The one kind that asks nobody for anything: UCX's own TCP listener in an engine process, which moves KV. The control
is that it listens on the worker's interface only, within `transport.port_range`, which a network policy opens between
the pools alone (tests/deploy/test_chart.py); and that a stranger's bytes do nothing (below)."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket, or a bound UDP one, and whose it is."""

    program: str
    kind: Kind | None
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def settings() -> ClusterConfig:
    tenants = {"root": {"keys": [digest_of(KEY)], "operator": True}, "acme": {"keys": [digest_of(MODEST)]}}
    return config(prefill=1, decode=1, step_s=0.0, tenants=tenants, timing={"resume_s": 0.3})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(settings(), tmp_path_factory.mktemp("listeners"), KEY) as cluster:
        yield cluster


def listeners(running: Stack) -> list[Listener]:
    """Of every process of every program, and of whatever these started."""
    found = []
    for name in running.cluster.names:
        ready = running.cluster.ready(name)
        top = psutil.Process(ready.pids[0])
        doors: dict[str, Kind] = {ready.address: "internal grpc"}
        if ready.http is not None and ready.admin is not None:
            http, admin = (url.rpartition("/")[2] for url in (ready.http, ready.admin))
            doors = {ready.address: "public grpc", http: "http", admin: "admin"}
        for one in listening((top, *top.children(recursive=True))):
            is_engine = one.what([UCX]) == UCX
            kind: Kind | None = "ucx" if is_engine else doors.get(f"{one.host}:{one.port}")
            found.append(Listener(name, kind, one.host, one.port))
    return found


def test_what_listens_is_ours_or_ucx_and_on_the_configured_interface(running: Stack) -> None:
    found = listeners(running)
    assert [each for each in found if each.kind is None] == []
    assert {each.host for each in found} == {"127.0.0.1"}
    ours = sorted((each.program, each.kind) for each in found if each.kind != "ucx")
    assert ours == [
        ("decode-0", "internal grpc"),
        ("prefill-0", "internal grpc"),
        ("router-0", "admin"),
        ("router-0", "http"),
        ("router-0", "public grpc"),
    ]
    assert {each.program for each in found if each.kind == "ucx"} <= {"decode-0", "prefill-0"}


async def status_of(url: str, method: str, path: str, header: dict[str, str]) -> int:
    async with connect(url) as line:
        await line.send(request_head(method, path, {"content-length": "0", **header}))
        return (await asyncio.wait_for(line.answer(), WITHIN_S)).status


@pytest.mark.parametrize("door", ["url", "admin_url"])
async def test_every_http_route_asks_for_a_key(running: Stack, door: str) -> None:
    every = routes()
    assert len(every) > 10
    for method, path in every:
        for header in ({}, {"authorization": f"Bearer {KEY}x"}, {"headrace-proof": "a.b.c"}):
            status = await status_of(getattr(running, door), method, path, header)
            is_open = path in OPEN and method in ("GET", "HEAD") and not (door == "url" and path in ADMIN)
            assert (status == 401) != is_open, (method, path, header, status)


async def test_numbers_are_at_the_admin_port_and_the_api_is_not(running: Stack) -> None:
    """S05, P09: with the key that may do everything, and with one that may not look."""
    root, tenant = ({"authorization": f"Bearer {key}"} for key in (KEY, MODEST))
    for method, path in routes():
        if path.startswith("/debug/requests/"):  # at both: 404 because nobody asked this
            continue
        here = [await status_of(url, method, path, root) for url in (running.url, running.admin_url)]
        assert (here[0] == 404) == (path in ADMIN), (method, path, here)
        assert (here[1] == 404) == (path not in ADMIN | OPEN), (method, path, here)
        odd = [await status_of(url, method, path + "%0A", root) for url in (running.url, running.admin_url)]
        assert odd == [404, 404], (method, path, "a pattern that ends in $ matches before a line break too")
    for method, path in routes():
        if path in ADMIN - OPEN and method in ("GET", "POST"):  # what acts wants more than a key
            expected = 200 if method == "GET" else 400
            assert await status_of(running.admin_url, method, path, root) == expected
            told = 200 if path == "/usage" else 403  # of which a tenant is told its own
            assert await status_of(running.admin_url, method, path, tenant) == told


def methods(*files: FileDescriptor) -> set[str]:
    names = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    return names | {f"/{HEALTH}/Watch", f"/{REFLECTION}/ServerReflectionInfo", "/headrace.v1.Nothing/Here"}


EVERY_METHOD = methods(session_pb2.DESCRIPTOR, link_pb2.DESCRIPTOR, watch_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR)


async def code_of(wire: grpc.aio.Channel, method: str, metadata: Metadata) -> grpc.StatusCode:
    call = wire.stream_stream(method, None, None)(None, metadata=metadata)
    code = await asyncio.wait_for(call.code(), WITHIN_S)
    assert isinstance(code, grpc.StatusCode)
    return code


async def test_every_grpc_method_asks_for_credentials_on_every_server(running: Stack) -> None:
    """A tenant's key is nothing inside, nor a member's proof outside."""
    for one in listeners(running):
        if one.kind not in ("public grpc", "internal grpc"):
            continue
        stranger = proof_metadata(Credentials("not the secret").proof(one.address))
        member, tenant = proof_metadata(credentials(running).proof(one.address)), auth_metadata(KEY)
        useless = [(), auth_metadata("guess"), stranger, tenant if one.kind == "internal grpc" else member]
        async with channel(one.address) as wire:
            for method in sorted(EVERY_METHOD):
                for metadata in useless:
                    assert await code_of(wire, method, metadata) is grpc.StatusCode.UNAUTHENTICATED, (one, method)
            asked = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(wire).Check(asked, timeout=WITHIN_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_no_server_has_a_service_that_this_test_does_not_know(running: Stack) -> None:
    known = {method.split("/")[1] for method in EVERY_METHOD} | {HEALTH}
    for one in listeners(running):
        if one.kind not in ("public grpc", "internal grpc"):
            continue
        inside = proof_metadata(credentials(running).proof(one.address))
        metadata = inside if one.kind == "internal grpc" else auth_metadata(KEY)
        async with channel(one.address) as wire:
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(wire)
            call = stub.ServerReflectionInfo(iter([question]), metadata=metadata, timeout=WITHIN_S)
            (answer,) = [each async for each in call]
        there = {service.name for service in answer.list_services_response.service}
        assert there <= known
        assert there > {HEALTH, REFLECTION}


class _Touch:
    """Unpickled, it leaves a file: whoever does that runs what strangers send."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._file), "w")


async def test_strangers_bytes_do_nothing_to_any_socket(running: Stack, tmp_path: Path) -> None:
    """S01: a pickle, a frame of 4 GB, random bytes, silence; on our doors and on UCX's."""
    pids = running.pids()
    proof = tmp_path / "unpickled"
    pickles = [pickle.dumps(_Touch(proof), protocol=protocol) for protocol in (0, 2, 5)]
    framed = [struct.pack(order, len(pickles[2])) + pickles[2] for order in ("<I", ">I", "<Q", ">Q")]
    sent = [*pickles, *framed, b"\xff\xff\xff\xff" + b"x" * 100, struct.pack("<Q", 1 << 32), os.urandom(4096), b""]
    for one in listeners(running):
        for data in sent:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(one.host, one.port)
                writer.write(data)
                await writer.drain()
                writer.write_eof()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 0.05)
                writer.transport.abort()
    assert not proof.exists()
    pickle.loads(pickles[0]).close()
    assert proof.exists(), "the pickles do what they should"
    await assert_unhurt(running, pids)
