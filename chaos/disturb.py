"""Process faults, seeded: kill, stop and restart one process after the other, one victim of each role at a time.

1. draw     for each role on its own: a victim, a fault, how long
2. do       SIGKILL of the server or the engine; SIGSTOP of either or both, SIGCONT later; SIGTERM, after which its
            supervisor starts the program again
3. wait     until the victim is ready again, and a router says so; only then the next one of this role

So whatever happens, all but one program of each role are untouched.
"""

import asyncio
import contextlib
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster.core.clock import Clock
from cluster.local import LocalCluster
from cluster.pipe import Ready, Role

_LOOK_S = 0.1
_RECOVERY_S = 60.0
_SERVER, _ENGINE = 0, 1
_WORKER_FAULTS = ("kill server", "kill engine", "stop server", "stop engine", "stop both", "stall engine", "restart")
_WORKER_WEIGHTS = (3, 3, 3, 2, 3, 0.5, 2)
_ROUTER_FAULTS = ("kill", "stop", "restart")
_ROUTER_WEIGHTS = (2, 3, 1)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One fault: what was done to whom, from when to when, and when the program served again."""

    name: str
    role: Role
    kind: str
    begin: float
    end: float = math.inf
    back: float = math.inf


@dataclass(slots=True)
class Disturbances:
    """Everything that was done so far."""

    done: list[Disturbance] = field(default_factory=list)

    def kinds(self) -> Counter[str]:
        return Counter(f"{each.role}: {each.kind}" for each in self.done)

    def of_decode(self, router: str, begin: float, end: float) -> list[str]:
        """What was done to decode workers from `begin` to `end`: kill, stop, ..., and whether it was done alone.

        Alone: no prefill worker, and not the router of that client, was being disturbed or had not recovered yet.
        """
        told = []
        for each in (d for d in self.done if d.role == "decode" and begin <= d.begin <= end):
            near = (d for d in self.done if d.begin <= end and begin <= d.back and d is not each)
            others = any(d.role != "router" or d.name == router for d in near)
            told.append(each.kind.split()[0] + (" with others" if others else ""))
        return told

    def count(self, name: str, kinds: tuple[str, ...]) -> int:
        """How often one of these was done to this program."""
        return sum(d.name == name and d.kind.split()[0] in kinds for d in self.done)

    def happened(self, name: str, kinds: tuple[str, ...], begin: float, end: float) -> bool:
        """Whether one of `kinds` was done to this program while something ran from `begin` to `end`."""
        return any(d.name == name and d.kind in kinds and begin <= d.end and d.begin <= end for d in self.done)


class Disturber:
    """Disturbs the programs of a cluster until cancelled, and leaves none of them stopped."""

    def __init__(
        self,
        cluster: LocalCluster,
        seed: int,
        rest_s: float,
        clock: Clock,
        is_seen: Callable[[Ready], Awaitable[bool]],
    ) -> None:
        """`is_seen`: whether a program that is ready is also known to be by those who use it."""
        self._cluster = cluster
        self._seed = seed
        self._rest_s = rest_s
        self._clock = clock
        self._is_seen = is_seen
        self.disturbances = Disturbances()
        self.unrecovered: list[str] = []

    async def run(self, stopping: asyncio.Event) -> None:
        """One fault after the other in each role that has more than one program, until `stopping`; then all recover."""
        roles: tuple[Role, ...] = ("prefill", "decode", "router")
        async with asyncio.TaskGroup() as group:
            for role in roles:
                names = [name for name in self._cluster.names if name.startswith(role)]
                if len(names) > 1:
                    group.create_task(self._disturb(role, names, stopping))

    async def _disturb(self, role: Role, names: list[str], stopping: asyncio.Event) -> None:
        rng = random.Random(f"{self._seed} {role}")
        while not stopping.is_set():
            await _pause(stopping, rng.uniform(0.5, 1.5) * self._rest_s)
            if stopping.is_set():
                return
            name, kind = rng.choice(names), _draw(rng, role)
            before = self._cluster.ready(name)
            seconds = rng.uniform(10.5, 13.0) if kind == "stall engine" else rng.uniform(0.2, 6.0)
            place = await self._do(role, kind, before, seconds)
            if not await self._recovered(before, restarted=kind.split()[0] in ("kill", "restart")):
                self.unrecovered.append(f"{name} after {kind}")
                return
            done = self.disturbances.done
            done[place] = replace(done[place], back=self._clock.now())

    async def _do(self, role: Role, kind: str, victim: Ready, seconds: float) -> int:
        """One fault from its begin to its end. Returns its place in the list."""
        what, _, which = kind.partition(" ")
        pids = {"server": victim.pids[:1], "engine": victim.pids[_ENGINE:]}.get(which, victim.pids)
        begin = self._clock.now()
        place = len(self.disturbances.done)
        self.disturbances.done.append(Disturbance(victim.name, role, kind, begin))
        if what in ("stop", "stall"):
            with _frozen(pids):
                await asyncio.sleep(seconds)
        else:
            _signal(pids[_SERVER], signal.SIGTERM if what == "restart" else signal.SIGKILL)
        # Until its supervisor knows that it is gone, clients are still sent to it.
        if what in ("kill", "restart"):
            await self._until(lambda: self._has_left(victim), _RECOVERY_S)
        self.disturbances.done[place] = replace(self.disturbances.done[place], end=self._clock.now())
        return place

    async def _has_left(self, victim: Ready) -> bool:
        status = self._cluster.status(victim.name)
        return status is None or status.ready is None or status.ready.epoch != victim.epoch

    async def _recovered(self, before: Ready, *, restarted: bool) -> bool:
        async def back() -> bool:
            status = self._cluster.status(before.name)
            if status is None or status.ready is None or (restarted and status.ready.epoch == before.epoch):
                return False
            return await self._is_seen(status.ready)

        return await self._until(back, _RECOVERY_S)

    async def _until(self, condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        give_up = self._clock.now() + within_s
        while not await condition():
            if self._clock.now() > give_up:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


def _draw(rng: random.Random, role: Role) -> str:
    if role == "router":
        return rng.choices(_ROUTER_FAULTS, _ROUTER_WEIGHTS)[0]
    return rng.choices(_WORKER_FAULTS, _WORKER_WEIGHTS)[0]


@contextlib.contextmanager
def _frozen(pids: tuple[int, ...]) -> Iterator[None]:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just left by itself
        os.kill(pid, number)


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)
