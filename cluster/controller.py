"""The controller: holds the desired counts and keeps the programs that way (DESIGN §2). No Ray here: a `Launcher` acts.

1. adopt      on start: ask every living supervisor what it runs, then load the desired counts (a new controller
              replaces a dead one; what runs goes on meanwhile). Until both are known no program is started or stopped
2. reconcile  desired against actual -> starts and stops (cluster/reconcile.py), whenever either changes
3. members    who is ready and how many are desired, pushed to every supervisor after each change; each forwards it to
              its program
4. drain      a program that is stopped leaves the list, drains, then ends; if it is still desired, reconciling starts
              its successor under the same name: draining one after the other is a rolling restart
5. audit      every `audit_s`, ask all supervisors again: a lost report or list heals, a vanished supervisor is started
              anew, a stop that failed or was a dead controller's is carried on

A name is started only when its last supervisor is known to be gone: one that leaves would be taken for the new one.
Losing the store stops nothing: the last known counts hold; a controller that never could load them adopts and waits.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.core.errors import ConfigError, HeadraceError
from cluster.pipe import ROLES, Member, Role
from cluster.reconcile import Start, Stop, reconcile
from cluster.store import Counts, DesiredStore, StoreUnavailable
from cluster.supervisor import ProgramStatus

AUDIT_S = 15.0
_RETRY_S = 1.0  # to adopt
_log = logging.getLogger(__name__)


class LaunchFailed(HeadraceError):
    """A supervisor that could not be started, reached or ended."""


class Launcher(Protocol):
    """Starts and reaches supervisors. Every call may raise LaunchFailed."""

    async def start(self, name: str, role: Role) -> None:
        """Start a supervisor, or do nothing when it is there already."""

    async def stop(self, name: str) -> None:
        """Let its program drain, then end both; returns when they are gone."""

    async def statuses(self) -> dict[str, ProgramStatus | None]:
        """Every living supervisor by name; None for one that does not answer now. `push` reaches those that do."""

    def push(self, name: str, members: tuple[Member, ...], desired: Counts | None) -> None:
        """Hand both to a supervisor; never waits for it."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What `headrace status` shows. `version` counts changes; `programs` are sorted by name."""

    version: int
    desired: Mapping[Role, int]
    programs: tuple[ProgramStatus, ...]
    stopping: tuple[str, ...]
    problem: str | None = None

    @property
    def ready(self) -> bool:
        """Exactly the desired programs run, and every one can take calls."""
        count = {role: sum(p.role == role and p.state == "ready" for p in self.programs) for role in self.desired}
        return count == dict(self.desired) and len(self.programs) == sum(count.values()) and not self.stopping


class Controller:
    """One per cluster. Everything runs on one event loop; `run` must be running."""

    def __init__(self, launcher: Launcher, store: DesiredStore, initial: Counts, *, audit_s: float = AUDIT_S) -> None:
        self._launcher = launcher
        self._store = store
        self._initial = initial
        self._audit_s = audit_s
        self._adopted = False
        self._desired: Counts | None = None
        self._programs: dict[str, ProgramStatus | None] = {}  # None: it runs, and has not said what
        self._stops: dict[str, asyncio.Task[str | None]] = {}  # one that has failed stays until the next audit
        self._deaf: set[str] = set()  # being started, or told to stop: they take no list
        self._pushed: dict[str, tuple[tuple[Member, ...], Counts | None]] = {}
        self._problem: str | None = None
        self._version = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Adopt, then reconcile at every change and audit now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._audit()
            if self._adopted and self._desired is None:
                await self._load_desired()
            acting = self._adopted and self._desired is not None
            next_audit = loop.time() + (self._audit_s if acting else _RETRY_S)
            while (left := next_audit - loop.time()) > 0:
                version = self._version
                await self._reconcile()
                self._push_members()
                if version == self._version:
                    await self._wait_beyond(version, left)

    def report(self, status: ProgramStatus) -> None:
        """A supervisor's news. Older news than what is known is ignored."""
        if status.name in self._programs or self._desired is None:
            self._take(status)

    async def scale(self, counts: Mapping[Role, int]) -> None:
        """Change desired counts, all or none. Raises ConfigError, or StoreUnavailable (then nothing has changed)."""
        for role, count in counts.items():
            if role not in ROLES or count < 0:
                raise ConfigError(f"{role}: {count} is not possible: a role ({', '.join(ROLES)}) and a number from 0")
        if self._desired is None:
            raise StoreUnavailable(self._problem or "the desired counts are not loaded yet")
        desired: Counts = {**self._desired, **counts}
        await self._store.save(desired)
        self._desired = desired
        self._note_change()

    async def drain(self, name: str) -> None:
        """Drain and end one program; returns when it is gone, and its successor is about to start.

        Raises ConfigError, LaunchFailed, or StoreUnavailable (then nothing was done: nobody knows what is desired).
        """
        if self._desired is None:
            raise StoreUnavailable(self._problem or "the desired counts are not loaded yet")
        if name not in self._programs and name not in self._stops:
            raise ConfigError(f"{name!r} does not run here: it is one of {', '.join(sorted(self._programs))}")
        stopping = self._stops.get(name)
        if stopping is None or stopping.done():  # done: it has failed
            stopping = self._begin_stop(name)
        if problem := await asyncio.shield(stopping):
            raise LaunchFailed(problem)

    async def stop_all(self) -> None:
        """End every program and supervisor; returns when they are gone. The stored counts stay."""
        self._desired = dict.fromkeys(ROLES, 0)
        self._note_change()
        while self._programs or self._stops or not self._adopted:
            await self._wait_beyond(self._version, None)

    def status(self) -> ClusterStatus:
        """The state now."""
        known = tuple(self._programs[name] for name in sorted(self._programs))
        programs = tuple(program for program in known if program is not None)
        desired = self._desired if self._desired is not None else self._initial
        return ClusterStatus(self._version, dict(desired), programs, tuple(sorted(self._stops)), self._problem)

    async def status_after(self, version: int, timeout_s: float) -> ClusterStatus:
        """The state as soon as it is newer than `version`, or as it is when the time is up."""
        await self._wait_beyond(version, timeout_s)
        return self.status()

    def members(self) -> tuple[Member, ...]:
        """Programs that can take calls and are not about to leave."""
        ready = (p.ready for name, p in sorted(self._programs.items()) if p is not None and name not in self._stops)
        return tuple(each.member() for each in ready if each is not None)

    async def _load_desired(self) -> None:
        try:
            stored = await self._store.load()
            if stored is None:
                await self._store.save(self._initial)
                stored = dict(self._initial)
        except StoreUnavailable as error:
            self._set_problem(f"adopting only, until the desired counts are known: {error}")
            return
        if self._desired is None:  # else everything is to stop, as of now
            self._desired = stored

    async def _audit(self) -> None:
        failed = {name: stopping for name, stopping in self._stops.items() if stopping.done()}
        leaving = set(self._stops) - set(failed)
        try:
            found = await self._launcher.statuses()
        except LaunchFailed as error:
            _log.warning("no audit this time: %s", error)
            if not self._adopted:
                self._set_problem(f"adopting only, until it is known what runs: {error}")
            return
        if not self._adopted:
            self._adopted = True
            self._note_change()
        for name, stopping in failed.items():
            if self._stops.get(name) is stopping:
                del self._stops[name]
                self._note_change()
        leaving |= set(self._stops)  # what was found of these may be old by now
        for name in sorted(set(self._programs) - set(found) - leaving):
            _log.warning("the supervisor of %s has vanished", name)
            self._forget(name)
        for name in sorted(set(found) - leaving):
            self._found(name, found[name])
        self._pushed.clear()  # a list may have been lost on its way

    def _found(self, name: str, status: ProgramStatus | None) -> None:
        if name not in self._programs:
            self._programs[name] = None
            self._note_change()
        if status is not None:
            self._take(status)
            if status.state == "stopped":  # by someone who did not live to end its supervisor
                self._begin_stop(name)

    async def _reconcile(self) -> None:
        if self._desired is None or not self._adopted:
            return
        problems = [stopping.result() for stopping in self._stops.values() if stopping.done()]
        staying = {name: p for name, p in self._programs.items() if name not in self._stops}
        running = {name: p is not None and p.state == "ready" for name, p in staying.items()}
        for action in reconcile(self._desired, running, self._stops):
            if isinstance(action, Stop):
                self._begin_stop(action.name)
            else:
                problems.append(await self._start(action))
        self._set_problem("; ".join(filter(None, problems)) or None)

    async def _start(self, action: Start) -> str | None:
        """Returns why it could not be started; it is tried again at the next change or audit."""
        self._programs[action.name] = None  # before the call: its first report may come before the call returns
        self._deaf.add(action.name)
        try:
            await self._launcher.start(action.name, action.role)
        except LaunchFailed as error:
            self._programs.pop(action.name, None)
            return f"cannot start {action.name}: {error}"
        finally:
            self._deaf.discard(action.name)
        self._note_change()
        return None

    def _set_problem(self, problem: str | None) -> None:
        if problem == self._problem:
            return
        if problem is not None:
            _log.error("%s", problem)
        self._problem = problem
        self._note_change()

    def _begin_stop(self, name: str) -> "asyncio.Task[str | None]":
        stopping = self._stops[name] = asyncio.ensure_future(self._stop(name))
        self._note_change()
        return stopping

    async def _stop(self, name: str) -> str | None:
        """Routers hear that it leaves before it is told to: new work goes elsewhere, running work drains.

        Returns why it could not be stopped. It may be leaving all the same: the next audit tells.
        """
        try:
            if not self._push_members():
                await self._look_again()
                self._push_members()  # who is still out of reach holds up no stop
            self._deaf.add(name)
            await self._launcher.stop(name)
        except LaunchFailed as error:
            _log.error("cannot stop %s: %s", name, error)
            self._note_change()
            return f"cannot stop {name}: {error}"
        finally:
            self._deaf.discard(name)
        del self._stops[name]
        self._forget(name)
        return None

    async def _look_again(self) -> None:
        try:
            await self._launcher.statuses()
        except LaunchFailed as error:
            _log.warning("not everybody hears who leaves: %s", error)

    def _push_members(self) -> bool:
        """To every supervisor that was last told otherwise. Returns whether all could be reached."""
        news, reached = (self.members(), self._desired), True
        for name in sorted(self._programs.keys() - self._deaf):
            if self._pushed.get(name) == news:
                continue
            try:
                self._launcher.push(name, *news)
                self._pushed[name] = news
            except LaunchFailed as error:
                _log.warning("cannot reach the supervisor of %s: %s", name, error)
                reached = False
        return reached

    def _take(self, status: ProgramStatus) -> None:
        known = self._programs.get(status.name)
        if known is not None and known.supervisor == status.supervisor and known.revision >= status.revision:
            return
        if known is None or known.supervisor != status.supervisor:
            self._pushed.pop(status.name, None)  # a new supervisor has no list yet
        self._programs[status.name] = status
        self._note_change()

    def _forget(self, name: str) -> None:
        self._programs.pop(name, None)
        self._pushed.pop(name, None)
        self._note_change()

    def _note_change(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_beyond(self, version: int, timeout_s: float | None) -> None:
        """Until the version differs from `version` or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._version == version:
                    await self._changed.wait()
        except TimeoutError:
            return


def leave_when_done(running: "asyncio.Future[None]") -> None:
    """A controller's loop never ends by itself: if it does, this process ends, and a new controller takes over."""
    if not running.cancelled():
        _log.critical("the controller's loop ended", exc_info=running.exception())
        signal.raise_signal(signal.SIGKILL)
