"""The routers of a running cluster, as clients and operators reach them: where they are, and what they say."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import grpc.aio

from chaos.exchange import Json, get, get_json
from cluster.local import LocalCluster
from cluster.pipe import Ready
from cluster.rpc import channel


@dataclass(slots=True)
class Totals:
    """Counters of processes that come and go: the last value of each life is kept."""

    _by_life: dict[str, dict[str, int]] = field(default_factory=dict)

    def take(self, life: str, counters: dict[str, int]) -> None:
        self._by_life[life] = counters

    def sums(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counters in self._by_life.values():
            total.update(counters)
        return total


class Routers:
    """Finds routers anew each time: they are killed and come back elsewhere."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.workers, self.routers = Totals(), Totals()

    def all(self) -> list[Ready]:
        """Those that run, as far as their supervisors know."""
        found = (self._cluster.status(name) for name in self._cluster.names if name.startswith("router"))
        return [status.ready for status in found if status is not None and status.ready is not None]

    def pick(self, rng: random.Random) -> Ready | None:
        """One of those that run, or None."""
        running = self.all()
        return rng.choice(running) if running else None

    def channel(self, router: Ready) -> grpc.aio.Channel:
        if router.address not in self._channels:
            self._channels[router.address] = channel(router.address)
        return self._channels[router.address]

    async def close(self) -> None:
        await asyncio.gather(*(each.close(None) for each in self._channels.values()))

    async def look(self, within_s: float = 2.0) -> list[Json]:
        """What every router that answers says now; remembers counters."""
        answers = await asyncio.gather(*(self._look(router, within_s) for router in self.all()))
        return [answer for answer in answers if answer is not None]

    async def _look(self, router: Ready, within_s: float) -> Json | None:
        try:
            said = await get_json(router.admin or "", "/status", within_s)
        except (OSError, TimeoutError, ValueError):
            return None  # it was killed or stopped a moment ago
        self.routers.take(str(said["epoch"]), cast("dict[str, int]", said["counters"]))
        for worker in cast("list[Json]", said["workers"]):
            self.workers.take(f"{worker['worker']} {worker['epoch']}", cast("dict[str, int]", worker["counters"]))
        return said

    async def sees(self, program: Ready) -> bool:
        """Whether a worker is ready in the eyes of a router; of a router: whether it could place a request."""
        if program.role == "router":
            said = await self._look(program, 1.0)
            return said is not None and bool(said["ready"])
        for said in await self.look(1.0):
            for worker in cast("list[Json]", said["workers"]):
                if worker["address"] == program.address and worker["state"] == "ready":
                    return True
        return False

    async def in_use(self) -> dict[str, int]:
        """Every gauge of every process that is not 0, and every worker that is not ready in some router's eyes (I2)."""
        used: dict[str, int] = {}
        expected = [name for name in self._cluster.names if not name.startswith("router")]
        missing = len(self._cluster.names) - len(expected) - len(self.all())
        used["routers that do not run"] = missing
        for router in self.all():
            said = await self._look(router, 2.0)
            if said is None:
                used[f"{router.name} does not answer"] = 1
                continue
            used |= {f"{router.name} {name}": n for name, n in cast("dict[str, int]", said["gauges"]).items()}
            workers = cast("list[Json]", said["workers"])
            for worker in workers:
                name = f"{worker['worker']} (by {router.name})"
                used |= {f"{name} {gauge}": n for gauge, n in cast("dict[str, int]", worker["gauges"]).items()}
                used[f"{name} attempts booked"] = cast("int", worker["attempts"])
                used[f"{name} is {worker['state']}"] = int(worker["state"] != "ready")
            used[f"{router.name} knows {len(workers)} workers of {len(expected)}"] = int(len(workers) != len(expected))
            used[f"{router.name} requests in flight"] = await _in_flight(router)
        return {name: count for name, count in used.items() if count}


async def _in_flight(router: Ready) -> int:
    metrics = (await get(router.admin or "", "/metrics")).decode()
    line = next(line for line in metrics.splitlines() if line.startswith("headrace_requests_in_flight "))
    return int(float(line.split()[1]))
