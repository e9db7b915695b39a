"""The front doors that are compared: Headrace before an instant worker, and other routers before a mock server.

Each is a context that gives a `Door` while it runs. Routers are pinned to one core, all else stays where it is started.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.processes import START_S, answering, free_port, pin, running
from cluster.config import load_config
from cluster.core.clock import Clock
from cluster.local import LocalCluster

MODEL = "mock"  # what the load asks for


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
    async with running([python, str(script), str(port)]) as program:
        await program.answering(port, MODEL, clock)
        yield Door("mock, direct", port)


@asynccontextmanager
async def peer(name: str, command: Sequence[str], cores: Cores, clock: Clock) -> AsyncIterator[Door]:
    """Another router. `{port}` in its command becomes its port. Raises Unavailable when it does not answer."""
    port = free_port()
    async with running([part.format(port=port) for part in command], cores.router) as program:
        await program.answering(port, MODEL, clock)
        yield Door(name, port, (program.pid,))


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
            await answering(port, MODEL, clock)
            pids = cluster.ready("router-0").pids
            for pid in pids:
                pin(pid, cores.router)
            yield Door(name, port, pids, counts=cluster.admin_url)
