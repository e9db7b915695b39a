"""A launcher and a store in memory, for the tests of the controller, and how those wait for it."""

import asyncio
from collections.abc import Callable

from cluster.controller import ClusterStatus, Controller, LaunchFailed
from cluster.pipe import Member, Ready, Role, role_of
from cluster.store import Counts, StoreUnavailable
from cluster.supervisor import ProgramStatus

ONE_EACH: Counts = {"prefill": 1, "decode": 1, "router": 1}


class FakeSupervisors:
    """Supervisors whose programs become ready when the test says so."""

    def __init__(self) -> None:
        self.running: dict[str, ProgramStatus] = {}
        self.told: dict[str, tuple[Member, ...]] = {}
        self.desired: dict[str, Counts | None] = {}
        self.refuse: set[str] = set()
        self.unreachable: set[str] = set()
        self.silent: set[str] = set()
        self.ended: list[str] = []
        self.stuck = self.away = False
        self.stopping = asyncio.Event()
        self.stopping.set()
        self._epoch = 0

    async def start(self, name: str, role: Role) -> None:
        if name in self.refuse:
            raise LaunchFailed(f"no room for {name}")
        self._epoch += 1
        self.running.setdefault(name, ProgramStatus(name, role, supervisor=self._epoch))

    async def stop(self, name: str) -> None:
        await self.stopping.wait()
        if self.stuck:
            raise LaunchFailed("it hangs")
        self.running.pop(name, None)
        self.ended.append(name)

    async def statuses(self) -> dict[str, ProgramStatus | None]:
        if self.away:
            raise LaunchFailed("nobody answers")
        self.unreachable = set(self.silent)
        return {name: None if name in self.silent else status for name, status in self.running.items()}

    def push(self, name: str, members: tuple[Member, ...], desired: Counts | None) -> None:
        if name in self.unreachable:
            raise LaunchFailed(f"no supervisor of {name} is known")
        self.told[name], self.desired[name] = members, desired

    def becomes(self, name: str, *, epoch: int | None, revision: int) -> ProgramStatus:
        """The program of `name` is ready with `epoch`, or dead (None)."""
        role = role_of(name)
        ready = None if epoch is None else Ready(name=name, role=role, address=f"{name}:1", epoch=epoch)
        state = self.running[name]
        self.running[name] = ProgramStatus(
            name, role, state.supervisor, revision, "ready" if ready else "waiting", ready
        )
        return self.running[name]


class MemoryStore:
    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts
        self.away = False

    async def load(self) -> Counts | None:
        if self.away:
            raise StoreUnavailable("the store is away")
        return self.counts

    async def save(self, counts: Counts) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")
        self.counts = counts

    async def close(self) -> None:
        return None


async def until(controller: Controller, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    """Let the controller run until `condition` holds."""
    async with asyncio.timeout(5):
        while not condition(controller.status()):  # noqa: ASYNC110 - some are about the fake, which has no event
            await asyncio.sleep(0)
    return controller.status()


def names(status: ClusterStatus) -> list[str]:
    return [program.name for program in status.programs]


async def adopted(controller: Controller, *expected: str) -> ClusterStatus:
    return await until(controller, lambda status: names(status) == sorted(expected) and not status.stopping)
