"""The controller when stops, audits or lists fail: no name is started while its last supervisor may still be there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.controller import Controller, LaunchFailed
from cluster.pipe import Role
from cluster.store import StoreUnavailable
from cluster.supervisor import ProgramStatus
from tests.unit.cluster.in_memory import ONE_EACH, FakeSupervisors, MemoryStore, adopted, names, until

NEVER_S = 3600.0


@asynccontextmanager
async def controlling(
    supervisors: FakeSupervisors, store: MemoryStore, audit_s: float = NEVER_S
) -> AsyncIterator[Controller]:
    controller = Controller(supervisors, store, ONE_EACH, audit_s=audit_s)
    running = asyncio.ensure_future(controller.run())
    try:
        yield controller
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def decode_0_is_ready(controller: Controller, supervisors: FakeSupervisors) -> None:
    """One of each runs, and everybody knows that the decode worker is ready."""
    await until(controller, lambda _: len(supervisors.running) == 3)
    controller.report(supervisors.becomes("decode-0", epoch=7, revision=1))
    await until(controller, lambda _: len(supervisors.told.get("router-0", ())) == 1)


async def test_a_stop_that_failed_keeps_its_name_until_an_audit_tells() -> None:
    """It may be leaving all the same: a start under its name would find it, and take it for the new one."""
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore()) as controller:
        await decode_0_is_ready(controller, supervisors)
        old = supervisors.running["decode-0"].supervisor
        supervisors.stuck = True
        with pytest.raises(LaunchFailed, match="cannot stop decode-0: it hangs"):
            await controller.drain("decode-0")
        status = await until(controller, lambda status: status.problem is not None)
        assert status.problem == "cannot stop decode-0: it hangs"
        assert status.stopping == ("decode-0",)
        supervisors.stuck = False
        await controller.drain("decode-0")  # asked again, it is tried again
        await until(controller, lambda _: "decode-0" in supervisors.running)
        assert supervisors.running["decode-0"].supervisor != old
        assert (await until(controller, lambda status: status.problem is None)).stopping == ()


async def test_a_stop_that_failed_is_tried_again_at_the_audit_and_an_end_of_everything_waits_for_it() -> None:
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore(), audit_s=0.02) as controller:
        await adopted(controller, "prefill-0", "decode-0", "router-0")
        supervisors.stuck = True
        ending = asyncio.ensure_future(controller.stop_all())
        for _ in range(2):
            await until(controller, lambda status: "cannot stop decode-0" in str(status.problem))
            assert not ending.done()
            await until(controller, lambda status: status.problem is None)
        supervisors.stuck = False
        await asyncio.wait_for(ending, 5)
        assert supervisors.running == {}


async def test_a_program_that_left_for_a_controller_that_died_gets_its_successor() -> None:
    """While it drains its supervisor answers nobody; afterwards it would stay "stopped" for ever."""
    supervisors, store = FakeSupervisors(), MemoryStore({"prefill": 0, "decode": 1, "router": 0})
    await supervisors.start("decode-0", "decode")
    old = supervisors.running["decode-0"]
    supervisors.silent = {"decode-0"}
    async with controlling(supervisors, store, audit_s=0.02) as controller:
        await until(controller, lambda status: status.desired == store.counts)
        assert supervisors.running == {"decode-0": old}
        supervisors.running["decode-0"] = replace(old, revision=2, state="stopped")
        supervisors.silent = set()
        await until(controller, lambda status: names(status) == ["decode-0"] and not status.stopping)
        await until(controller, lambda status: [p.supervisor for p in status.programs] not in ([], [old.supervisor]))
    assert supervisors.ended == ["decode-0"]


async def test_nothing_is_started_or_stopped_before_it_is_known_what_runs() -> None:
    """A start could find a program that leaves for the last controller; who must hear of a stop is not known."""
    supervisors = FakeSupervisors()
    await supervisors.start("decode-3", "decode")
    supervisors.away = True
    async with controlling(supervisors, MemoryStore()) as controller:
        await until(controller, lambda status: "nobody answers" in str(status.problem))
        with pytest.raises(StoreUnavailable, match="until it is known what runs"):
            await controller.scale({"decode": 2})
        ending = asyncio.ensure_future(controller.stop_all())
        await until(controller, lambda status: status.desired["decode"] == 0)
        assert not ending.done()
        assert list(supervisors.running) == ["decode-3"]
        ending.cancel()


async def test_an_end_of_everything_before_anything_is_known_ends_though_nothing_runs() -> None:
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore()) as controller:
        await asyncio.wait_for(controller.stop_all(), 5)
    assert supervisors.running == {}


async def test_nobody_is_looked_up_for_a_program_that_is_just_being_started() -> None:
    """It knows no list yet, and it takes seconds to answer."""

    class Slow(FakeSupervisors):
        asked = 0
        ready = asyncio.Event()

        async def start(self, name: str, role: Role) -> None:
            if name == "decode-0":
                self.unreachable.add(name)
                await self.ready.wait()
            await super().start(name, role)

        async def statuses(self) -> dict[str, ProgramStatus | None]:
            self.asked += 1
            return await super().statuses()

    supervisors = Slow()
    await supervisors.start("decode-1", "decode")
    await supervisors.start("prefill-0", "prefill")
    async with controlling(supervisors, MemoryStore({"prefill": 0, "decode": 2, "router": 0})) as controller:
        await until(controller, lambda _: supervisors.ended == ["prefill-0"])
        assert supervisors.asked == 1  # to adopt
        supervisors.ready.set()


async def test_who_cannot_be_reached_is_looked_up_again_before_a_program_is_stopped() -> None:
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore()) as controller:
        await decode_0_is_ready(controller, supervisors)
        supervisors.unreachable = {"router-0"}
        supervisors.stopping.clear()
        draining = asyncio.ensure_future(controller.drain("decode-0"))
        await until(controller, lambda _: supervisors.told["router-0"] == ())
        assert "decode-0" in supervisors.running
        supervisors.stopping.set()
        await asyncio.wait_for(draining, 5)


async def test_who_stays_out_of_reach_holds_up_no_stop() -> None:
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore()) as controller:
        await decode_0_is_ready(controller, supervisors)
        for away in (False, True):
            supervisors.unreachable = supervisors.silent = {"router-0"}
            supervisors.away = away
            await asyncio.wait_for(controller.drain("decode-0"), 5)
            await until(controller, lambda _: "decode-0" in supervisors.running)
    assert supervisors.ended == ["decode-0", "decode-0"]


async def test_a_list_that_was_lost_is_sent_again_by_the_audit() -> None:
    supervisors = FakeSupervisors()
    async with controlling(supervisors, MemoryStore(), audit_s=0.02) as controller:
        await adopted(controller, "prefill-0", "decode-0", "router-0")
        await decode_0_is_ready(controller, supervisors)
        supervisors.told["router-0"] = ()
        await until(controller, lambda _: len(supervisors.told["router-0"]) == 1)


async def test_an_audit_does_not_bring_back_what_ended_while_it_asked() -> None:
    class Slow(FakeSupervisors):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.answer = asyncio.Event(), asyncio.Event()
            self.answer.set()

        async def statuses(self) -> dict[str, ProgramStatus | None]:
            found = await super().statuses()
            self.asked.set()
            await self.answer.wait()
            return found

    supervisors = Slow()
    async with controlling(supervisors, MemoryStore(), audit_s=0.02) as controller:
        await adopted(controller, "prefill-0", "decode-0", "router-0")
        old = supervisors.running["decode-0"].supervisor
        supervisors.stopping.clear()
        draining = asyncio.ensure_future(controller.drain("decode-0"))
        await until(controller, lambda status: status.stopping == ("decode-0",))
        supervisors.answer.clear()
        supervisors.asked.clear()
        await asyncio.wait_for(supervisors.asked.wait(), 5)
        supervisors.stopping.set()
        await asyncio.wait_for(draining, 5)
        supervisors.answer.set()
        status = await until(controller, lambda status: "decode-0" in names(status))
        assert status.programs[0].supervisor != old
