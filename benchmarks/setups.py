"""The two clusters that are compared: same programs, same model, same cores, same router; only the roles differ.

    split        one prefill worker, one decode worker
    aggregated   two decode workers that prefill their own prompts
Both stay up during the whole run and take turns; the idle one's processor time is measured and reported. Each worker's
engine is pinned to a core of its own (all its threads); servers, routers and the client share the cores that are left,
or all of them where none is.
"""

import asyncio
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.http_client import HttpClient
from benchmarks.processes import pin
from benchmarks.workloads import Ask, Writer
from cluster.config import load_config
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable
from cluster.local import LocalCluster

SPLIT = "split"
AGGREGATED = "aggregated"
WORKERS = {
    SPLIT: ("pools.prefill.replicas=1", "pools.decode.replicas=1"),
    AGGREGATED: ("pools.prefill.replicas=0", "pools.decode.replicas=2"),
}
READY_S = 120.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Setup:
    """A running cluster under its name."""

    name: str
    cluster: LocalCluster

    @property
    def engines(self) -> list[int]:
        """Pids of the engine processes, in order of name. Raises Unavailable."""
        workers = [name for name in sorted(self.cluster.names) if not name.startswith("router")]
        return [self.cluster.ready(name).pids[-1] for name in workers]

    def processes(self) -> dict[str, int]:
        """What each process is -> its pid."""
        found: dict[str, int] = {}
        for name in sorted(self.cluster.names):
            server, *engine = self.cluster.ready(name).pids
            found[f"{name} server" if engine else name] = server
            found |= {f"{name} engine": pid for pid in engine}
        return found


def make_cluster(name: str, model: str, settings: Sequence[str], folder: Path) -> LocalCluster:
    """Not started yet. Raises ConfigError."""
    ports = ("router.http_port=0", "router.grpc_port=0", "log_level=warning")
    config = load_config(None, [f"model={model}", f"name={name}", *ports, *settings, *WORKERS[name]])
    return LocalCluster(config, folder)


async def wait_serving(setup: Setup, client: HttpClient, clock: Clock) -> None:
    """Until the router would place a request. Raises Unavailable."""
    give_up = clock.now() + READY_S
    while (await client.get("/ready")).status != 200:  # readiness is polled, as an operator's probe would
        if clock.now() > give_up:
            raise Unavailable(f"{setup.name}: the router is not ready after {READY_S:g} s")
        await asyncio.sleep(POLL_S)


async def status_of(admin: HttpClient) -> dict[str, Any]:
    """What the router tells at its admin port of its queue and its workers now."""
    status: dict[str, Any] = orjson.loads((await admin.get("/status")).body)
    return status


async def warm_up(setup: Setup, client: HttpClient, writer: Writer, longest: int) -> None:
    """Requests that are not counted: every worker computes a short, a middling and a long prompt."""
    workers = max(1, len(setup.engines))
    for number, tokens in enumerate((64, 512, longest)):
        asks = [Ask("warm", _unlike(writer, tokens, f"{setup.name}/{number}/{i}"), 8) for i in range(workers)]
        for timeline in await asyncio.gather(*(client.stream(ask) for ask in asks)):
            if not timeline.ok:
                raise Unavailable(f"{setup.name}: a warm-up request failed: {timeline.error}")


def _unlike(writer: Writer, tokens: int, seed: str) -> str:
    return writer.prompt(random.Random(f"warm/{seed}"), tokens)


@contextmanager
def pinned(setups: Sequence[Setup]) -> Iterator[str]:
    """Pin engines and everything else; gives how, in words. This process gets its own cores back afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        yield "nothing is pinned: this system cannot"
        return
    cores = sorted(os.sched_getaffinity(0))
    try:
        yield _pin(setups, cores)
    finally:
        pin(os.getpid(), set(cores))


def _pin(setups: Sequence[Setup], cores: Sequence[int]) -> str:
    most = 0
    for setup in setups:
        for place, pid in enumerate(setup.engines):
            pin(pid, {cores[place % len(cores)]})
            most = max(most, place + 1)
    rest = set(cores[most:]) or set(cores)
    for setup in setups:
        for what, pid in setup.processes().items():
            if not what.endswith("engine"):
                pin(pid, rest)
    pin(os.getpid(), rest)
    where = f"cores {sorted(rest)}" if len(cores) > most else f"all cores {sorted(rest)}, as none is left"
    return (
        f"each engine on its own core ({cores[:most]}: n-th worker of either set-up on the n-th); the rest on {where}"
    )


def cpu_seconds(setups: Iterable[Setup]) -> dict[str, float]:
    """Processor time so far: `set-up/process` -> seconds, and `client` for this process."""
    used = {"client": cpu_of(os.getpid())}
    for setup in setups:
        used |= {f"{setup.name}/{what}": cpu_of(pid) for what, pid in setup.processes().items()}
    return used


def cpu_of(pid: int) -> float:
    """Processor seconds of one process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
