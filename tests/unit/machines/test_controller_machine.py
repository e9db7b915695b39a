"""The controller among supervisors, a store and operators that do anything, in any order (DESIGN §2, §8).

The launcher here is the truth: which programs run, which are leaving, what each was told. Whatever happened, once
everybody answers again exactly the desired programs run and all know all that are ready.
"""

import asyncio
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.controller import Controller, LaunchFailed
from cluster.core.errors import HeadraceError
from cluster.pipe import ROLES, Member, Ready, Role, role_of
from cluster.store import Counts, StoreUnavailable
from cluster.supervisor import ProgramStatus, State
from tests.stateful import long, quick
from tests.unit.machines.virtual import VirtualLoop

AUDIT_S = 15.0
TROUBLES = ["refusing", "away", "hanging", "failing", "stuck", "losing"]
counts = st.dictionaries(st.sampled_from(ROLES), st.integers(0, 3), min_size=1)
names = st.builds("{}-{}".format, st.sampled_from(ROLES), st.integers(0, 3))


class Supervisors:
    """A launcher in memory, as Ray's actors behave.

    One that was told to stop answers nobody before its program has ended; then it says "stopped", until somebody ends
    it too. A start finds the one of that name that is there, whatever it does.
    """

    def __init__(self) -> None:
        self.running: dict[str, ProgramStatus] = {}
        self.told: dict[str, tuple[Member, ...]] = {}
        self.desired: dict[str, Counts | None] = {}
        self.lost: set[str] = set()  # those whose last list was lost on its way
        self.unreachable: set[str] = set()  # until they are looked up again
        self.leaving: dict[str, asyncio.Event] = {}  # told to stop, and still there; set: the program has ended
        self.refusing = self.away = self.hanging = self.failing = self.stuck = self.losing = False
        self._made = 0

    async def start(self, name: str, role: Role) -> None:
        assert role_of(name) == role
        assert name not in self.leaving, "started while it was still leaving"
        if self.refusing:
            raise LaunchFailed("no room")
        if name not in self.running:
            self._made += 1
            self.running[name] = ProgramStatus(name, role, self._made)
            self.told.pop(name, None)
            self.desired.pop(name, None)
            self.lost.discard(name)
        self.unreachable.discard(name)

    async def stop(self, name: str) -> None:
        for other in set(self.told) - {name} - set(self.leaving) - self.lost:
            if not (self.away and other in self.unreachable):
                assert name not in [m.name for m in self.told[other]], f"{other} was not told that {name} leaves"
        if self.failing or name not in self.running:
            raise LaunchFailed("it cannot be found")
        ended = self.leaving.setdefault(name, asyncio.Event())
        if not self.hanging:
            self.ended(name)
        await ended.wait()
        if self.stuck:
            raise LaunchFailed("it cannot be ended")
        for known in (self.running, self.told, self.desired, self.leaving):
            known.pop(name, None)

    def ended(self, name: str) -> None:
        """The program of one that was told to stop has ended."""
        if not self.leaving[name].is_set():
            self.becomes(name, "stopped")
            self.leaving[name].set()

    def living(self) -> list[str]:
        """Those whose program may still change."""
        return [name for name in self.running if name not in self.leaving or not self.leaving[name].is_set()]

    async def statuses(self) -> dict[str, ProgramStatus | None]:
        if self.away:
            raise LaunchFailed("nobody answers")
        silent = {name for name, ended in self.leaving.items() if not ended.is_set()}
        self.unreachable = silent
        return {name: None if name in silent else status for name, status in self.running.items()}

    def push(self, name: str, members: tuple[Member, ...], desired: Counts | None) -> None:
        if name in self.unreachable:
            raise LaunchFailed("it is not known where it is")
        self.lost.discard(name)
        if self.losing:
            self.lost.add(name)
        elif name in self.running:
            self.told[name], self.desired[name] = members, desired

    def becomes(self, name: str, state: State) -> ProgramStatus:
        old = self.running[name]
        epoch = old.supervisor * 1000 + old.revision
        said = Ready(name=name, role=old.role, address=f"{name}:1", epoch=epoch) if state == "ready" else None
        new = ProgramStatus(name, old.role, old.supervisor, old.revision + 1, state, said)
        self.running[name] = new
        return new


class Store:
    """The desired counts, when it can be reached."""

    def __init__(self) -> None:
        self.counts: Counts | None = None
        self.away = False

    async def load(self) -> Counts | None:
        if self.away:
            raise StoreUnavailable("away")
        return self.counts

    async def save(self, counts: Counts) -> None:
        if self.away:
            raise StoreUnavailable("away")
        self.counts = counts

    async def close(self) -> None:
        return None


class Cluster(RuleBasedStateMachine):
    """One controller at a time, supervisors, a store."""

    @initialize(first=counts, away=st.booleans())
    def begin(self, first: Counts, away: bool) -> None:
        self.loop = VirtualLoop()
        self.supervisors, self.store = Supervisors(), Store()
        self.store.away = away
        self.first: Counts = {**dict.fromkeys(ROLES, 1), **first}
        self.new_controller()

    def new_controller(self) -> None:
        self.supervisors.unreachable = set(self.supervisors.running)
        self.controller = Controller(self.supervisors, self.store, self.first, audit_s=AUDIT_S)
        self.running = self.loop.create_task(self.controller.run())
        self.loop.let_pass(0.01)

    @rule()
    def controller_dies(self) -> None:
        """Its actor is gone with everything it waited for; what it had told others goes on."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.let_pass(0.01)
        self.new_controller()

    @rule(wanted=counts)
    def scale(self, wanted: Counts) -> None:
        """All or none: a store that cannot be reached changes nothing."""
        before, version = dict(self.controller.status().desired), self.controller.status().version
        try:
            self.loop.run(self.controller.scale(wanted))
        except StoreUnavailable:
            assert dict(self.controller.status().desired) == before
            assert self.controller.status().version == version
        else:
            assert dict(self.controller.status().desired) == {**before, **wanted} == self.store.counts
        self.loop.let_pass(0.01)

    @rule(role=st.sampled_from(ROLES), count=st.integers(-3, -1))
    def scale_to_nonsense(self, role: Role, count: int) -> None:
        before = self.controller.status()
        try:
            self.loop.run(self.controller.scale({role: count}))
        except HeadraceError:
            assert self.controller.status() == before
        else:
            raise AssertionError("a negative count was taken")

    @rule(name=names, twice=st.booleans())
    def drain(self, name: str, twice: bool) -> None:
        """One that runs, leaves already, or never was."""
        asked = [self.loop.create_task(self.controller.drain(name)) for _ in range(1 + twice)]
        self.loop.let_pass(0.01)
        for one in asked:
            if one.done() and one.exception() is not None:
                assert isinstance(one.exception(), HeadraceError)

    @rule(name=names, ready=st.booleans(), heard=st.booleans())
    def change(self, name: str, ready: bool, heard: bool) -> None:
        """A program comes up or dies; the report of it may be lost."""
        if name in self.supervisors.living():
            status = self.supervisors.becomes(name, "ready" if ready else "waiting")
            if heard:
                self.controller.report(status)
            self.loop.let_pass(0.01)

    @rule(ready=st.sampled_from([True, True, False]))
    def all_change(self, ready: bool) -> None:
        for name in self.supervisors.living():
            self.controller.report(self.supervisors.becomes(name, "ready" if ready else "waiting"))
        self.loop.let_pass(0.01)

    @rule(name=names)
    def old_news(self, name: str) -> None:
        """A report that others have overtaken, or of a supervisor long gone: nothing changes by the former."""
        status = self.supervisors.running.get(name)
        known = {program.name: program for program in self.controller.status().programs}
        if status is not None and name in known and known[name].supervisor == status.supervisor:
            before = self.controller.status()
            old = ProgramStatus(name, status.role, status.supervisor, revision=0, state="stopped")
            if known[name].revision > 0:
                self.controller.report(old)
                assert self.controller.status() == before

    @rule(name=names)
    def vanish(self, name: str) -> None:
        if name in self.supervisors.running and name not in self.supervisors.leaving:
            del self.supervisors.running[name]
            self.supervisors.told.pop(name, None)
            self.supervisors.desired.pop(name, None)

    @rule(name=names)
    def out_of_reach(self, name: str) -> None:
        if name in self.supervisors.running:
            self.supervisors.unreachable.add(name)

    @rule(what=st.sampled_from(TROUBLES), on=st.booleans())
    def trouble(self, what: str, on: bool) -> None:
        setattr(self.supervisors, what, on)

    @rule(heard=st.booleans())
    def programs_that_leave_end(self, heard: bool) -> None:
        for name in list(self.supervisors.leaving):
            self.supervisors.ended(name)
            if heard:
                self.controller.report(self.supervisors.running[name])
        self.loop.let_pass(0.01)

    @rule(away=st.booleans())
    def store_goes_or_comes(self, away: bool) -> None:
        self.store.away = away

    @rule(seconds=st.sampled_from([1.5, AUDIT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.loop.let_pass(seconds)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "controller"):
            return
        assert not self.running.done(), "the controller's loop has ended"
        status = self.controller.status()
        stopping = set(status.stopping)
        members = [m.name for m in self.controller.members()]
        assert sorted(set(members)) == members
        assert not set(members) & stopping
        assert set(members) <= {p.name for p in status.programs if p.state == "ready"}
        loaded = status.problem is None or "adopting" not in status.problem
        if loaded and self.store.counts is not None:
            assert dict(status.desired) == self.store.counts

    def teardown(self) -> None:
        """All answer again: what is desired runs, nothing else, and all know of all and of what is desired."""
        if not hasattr(self, "controller"):
            return
        self.store.away = False
        for what in TROUBLES:
            self.trouble(what, False)
        self.programs_that_leave_end(False)
        for _ in range(3):
            self.loop.let_pass(AUDIT_S + 1)
            self.all_change(True)
        status = self.controller.status()
        assert Counter(role_of(name) for name in self.supervisors.running) == Counter(self.store.counts)
        assert status.ready, status
        everybody = self.controller.members()
        assert len(everybody) == len(self.supervisors.running)
        assert all(told == everybody for told in self.supervisors.told.values())
        assert all(desired == self.store.counts for desired in self.supervisors.desired.values())
        assert set(self.supervisors.told) == set(self.supervisors.running)
        self.loop.stop_all()


TestCluster = quick(Cluster, examples=60, steps=30)
TestClusterLong = long(Cluster, examples=400, steps=60)
