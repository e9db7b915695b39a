"""The front doors that are compared: Headrace before an instant worker, and other routers before a mock server.

Each is a context that gives a `Door` while it runs. Routers are pinned to one core, all else stays where it is started.
"""

import asyncio
import os
import socket
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.http_client import Answer, HttpClient
from cluster.config import load_config
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable
from cluster.local import LocalCluster

MODEL = "mock"  # what the load asks for
PROMPT = "hello there, how are you today?"
START_S = 300.0  # a busy machine
POLL_S = 0.1
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Door:
    """Something that answers /v1/completions. `pids`: the processes whose time is counted; none for the mock itself."""

    name: str
    port: int
    pids: tuple[int, ...] = ()
    counts: str | None = None
    """Base URL of the /metrics that say how many requests and tokens it has answered (Headrace's own)."""

    def cpu_s(self) -> float:
        """Processor seconds of its processes so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return float(sum(t.user + t.system for t in times))


@dataclass(frozen=True, slots=True)
class Cores:
    """Where routers run, and where everything else does. Equal where there is only one core."""

    router: tuple[int, ...]
    others: tuple[int, ...]


@asynccontextmanager
async def mock(script: Path, python: str, clock: Clock) -> AsyncIterator[Door]:
    """The mock server itself: what a router in front of it adds is measured against this."""
    port = free_port()
    async with _process([python, str(script), str(port)], None, port, clock):
        yield Door("mock, direct", port)


@asynccontextmanager
async def peer(name: str, command: Sequence[str], cores: Cores, clock: Clock) -> AsyncIterator[Door]:
    """Another router. `{port}` in its command becomes its port. Raises Unavailable when it does not answer."""
    port = free_port()
    async with _process([part.format(port=port) for part in command], cores.router, port, clock) as process:
        yield Door(name, port, (process.pid,))


@asynccontextmanager
async def headrace(
    name: str,
    worker: str,
    model: str,
    cores: Cores,
    clock: Clock,
    *,
    settings: Sequence[str] = (),
    router: str | None = None,
) -> AsyncIterator[Door]:
    """Our router before an instant worker (`benchmarks.instant.<worker>`). `router`: another entry point plays it."""
    with tempfile.TemporaryDirectory() as folder:
        ours = ("router.http_port=0", "router.grpc_port=0", "log_level=warning", f"served_name={MODEL}")
        none = ("pools.prefill.replicas=0", "pools.decode.replicas=0", "router.replicas=0")
        config = load_config(None, [f"model={model}", "name=overhead", *ours, *none, *settings])
        with LocalCluster(config, Path(folder)) as cluster:
            cluster.start("router-0", router)
            cluster.start("decode-0", f"benchmarks.instant.{worker}")
            await asyncio.to_thread(cluster.wait_ready, START_S)
            port = int(cluster.url.rpartition(":")[2])
            await _answering(port, clock)
            pids = cluster.ready("router-0").pids
            for pid in pids:
                pin(pid, cores.router)
            yield Door(name, port, pids, counts=cluster.admin_url)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Every thread of a process: the call speaks of threads, and later ones inherit."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), set(cores))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def _process(
    command: Sequence[str], cores: Sequence[int] | None, port: int, clock: Clock
) -> AsyncIterator[Process]:
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            await _answering(port, clock)
            yield process
        except Unavailable as error:
            log.seek(0)
            raise Unavailable(f"{error}: {log.read()[-2000:].decode(errors='replace')}") from error
        finally:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _answering(port: int, clock: Clock) -> None:
    """Until a completion is answered. Raises Unavailable."""
    give_up = clock.now() + START_S
    async with HttpClient(f"http://127.0.0.1:{port}", MODEL, clock, timeout_s=5.0) as client:
        while True:  # readiness is polled, as an operator's probe would
            try:
                answer: Answer | None = await client.complete(PROMPT, 8)
            except (OSError, TimeoutError):
                answer = None
            if answer is not None and answer.status == 200:
                return
            if clock.now() > give_up:
                raise Unavailable(f"port {port} does not answer (last status {answer and answer.status})")
            await asyncio.sleep(POLL_S)
