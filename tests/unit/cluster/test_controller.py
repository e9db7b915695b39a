"""The controller against a launcher in memory: adoption, scaling, restarts, membership, a store that is away."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.controller import Controller, LaunchFailed
from cluster.core.errors import ConfigError
from cluster.pipe import Member
from cluster.store import StoreUnavailable
from tests.unit.cluster.in_memory import ONE_EACH, FakeSupervisors, MemoryStore, adopted, until


@pytest.fixture
async def supervisors() -> FakeSupervisors:
    return FakeSupervisors()


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def controller(supervisors: FakeSupervisors, store: MemoryStore) -> AsyncIterator[Controller]:
    one = Controller(supervisors, store, ONE_EACH, audit_s=0.02)
    running = asyncio.ensure_future(one.run())
    yield one
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_starts_what_the_configuration_wants_and_remembers_it(
    controller: Controller, supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    status = await adopted(controller, "prefill-0", "decode-0", "router-0")
    assert not status.ready
    assert store.counts == ONE_EACH
    for number, name in enumerate(["prefill-0", "decode-0", "router-0"]):
        controller.report(supervisors.becomes(name, epoch=number, revision=1))
    assert (await until(controller, lambda status: status.ready)).problem is None


async def test_members_are_who_is_ready_and_everybody_hears_each_change(
    controller: Controller, supervisors: FakeSupervisors
) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    controller.report(supervisors.becomes("decode-0", epoch=7, revision=1))
    await until(controller, lambda _: len(supervisors.told.get("router-0", ())) == 1)
    assert supervisors.told["router-0"] == (Member(name="decode-0", role="decode", address="decode-0:1", epoch=7),)
    controller.report(supervisors.becomes("decode-0", epoch=None, revision=2))
    assert controller.members() == ()
    controller.report(supervisors.becomes("decode-0", epoch=8, revision=3))
    await until(controller, lambda _: all([m.epoch for m in told] == [8] for told in supervisors.told.values()))
    assert set(supervisors.told) == {"prefill-0", "decode-0", "router-0"}


async def test_everybody_hears_how_many_are_desired_also_where_that_changes_nobody(
    controller: Controller, supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    await until(controller, lambda _: supervisors.desired == dict.fromkeys(supervisors.running, ONE_EACH))
    supervisors.refuse.add("prefill-1")
    await controller.scale({"prefill": 2})
    wanted = {**ONE_EACH, "prefill": 2}
    await until(controller, lambda _: supervisors.desired == dict.fromkeys(supervisors.running, wanted))
    assert list(supervisors.running) == ["prefill-0", "decode-0", "router-0"]


async def test_old_news_is_ignored(controller: Controller, supervisors: FakeSupervisors) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    old = supervisors.becomes("decode-0", epoch=7, revision=1)
    controller.report(supervisors.becomes("decode-0", epoch=8, revision=2))
    controller.report(old)
    assert [member.epoch for member in controller.members()] == [8]


async def test_scaling_up_and_down_again(controller: Controller, supervisors: FakeSupervisors) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    await controller.scale({"decode": 3})
    await adopted(controller, "decode-0", "decode-1", "decode-2", "prefill-0", "router-0")
    for number in range(3):
        controller.report(supervisors.becomes(f"decode-{number}", epoch=number, revision=1))
    supervisors.stopping.clear()
    await controller.scale({"decode": 1})
    await until(controller, lambda status: status.stopping == ("decode-1", "decode-2"))
    await until(controller, lambda _: len(supervisors.told["router-0"]) == 1)  # told before they are gone
    await controller.scale({"decode": 2})  # decode-1 is wanted again while it still leaves
    supervisors.stopping.set()
    await adopted(controller, "decode-0", "decode-1", "prefill-0", "router-0")


async def test_a_drained_program_gets_a_successor_and_was_never_missing_from_the_list_by_surprise(
    controller: Controller, supervisors: FakeSupervisors
) -> None:
    """A rolling restart, one program at a time: off the list first, then stopped, then a new life under its name."""
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    await controller.scale({"decode": 2, "prefill": 0})
    before = await adopted(controller, "decode-0", "decode-1", "router-0")
    for number in range(2):
        controller.report(supervisors.becomes(f"decode-{number}", epoch=number, revision=1))
    await until(controller, lambda _: len(supervisors.told["router-0"]) == 2)
    supervisors.stopping.clear()
    draining = asyncio.ensure_future(controller.drain("decode-0"))
    await until(controller, lambda _: [m.name for m in supervisors.told["router-0"]] == ["decode-1"])
    assert "decode-0" in supervisors.running
    assert controller.status().stopping == ("decode-0",)
    again = asyncio.ensure_future(controller.drain("decode-0"))  # asked twice, drained once
    assert not draining.done()
    supervisors.stopping.set()
    await asyncio.wait_for(asyncio.gather(draining, again), 5)
    after = await adopted(controller, "decode-0", "decode-1", "router-0")
    assert after.programs[0].supervisor > before.programs[0].supervisor
    assert after.programs[0].restarts == after.programs[0].early_deaths == 0
    assert after.programs[1].supervisor == before.programs[1].supervisor
    assert after.desired == {"prefill": 0, "decode": 2, "router": 1}


async def test_only_what_runs_can_be_drained(
    controller: Controller, supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    with pytest.raises(ConfigError, match="decode-0, prefill-0, router-0"):
        await controller.drain("decode-1")
    supervisors.stuck = True
    with pytest.raises(LaunchFailed, match="cannot stop decode-0: it hangs"):
        await controller.drain("decode-0")
    supervisors.stuck = False
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    store.away = True
    orphan = Controller(supervisors, store, ONE_EACH)
    with pytest.raises(StoreUnavailable):
        await orphan.drain("decode-0")


async def test_a_new_controller_adopts_what_runs_and_keeps_the_stored_counts(supervisors: FakeSupervisors) -> None:
    await supervisors.start("decode-0", "decode")
    await supervisors.start("decode-1", "decode")
    before = supervisors.becomes("decode-0", epoch=5, revision=9)
    controller = Controller(supervisors, MemoryStore({"prefill": 0, "decode": 2, "router": 0}), ONE_EACH)
    running = asyncio.ensure_future(controller.run())
    status = await adopted(controller, "decode-0", "decode-1")
    assert status.programs[0] == before
    assert status.desired == {"prefill": 0, "decode": 2, "router": 0}
    running.cancel()


async def test_a_vanished_supervisor_is_replaced(controller: Controller, supervisors: FakeSupervisors) -> None:
    status = await adopted(controller, "prefill-0", "decode-0", "router-0")
    old = status.programs[0].supervisor
    del supervisors.running["decode-0"]
    await until(controller, lambda status: any(p.name == "decode-0" and p.supervisor != old for p in status.programs))


async def test_a_supervisor_that_cannot_start_is_tried_again(
    controller: Controller, supervisors: FakeSupervisors
) -> None:
    supervisors.refuse = {"decode-1"}
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    await controller.scale({"decode": 2})
    await until(controller, lambda status: status.problem == "cannot start decode-1: no room for decode-1")
    supervisors.refuse = set()
    status = await adopted(controller, "prefill-0", "decode-0", "decode-1", "router-0")
    assert status.problem is None


async def test_without_the_store_what_runs_is_adopted_and_nothing_else_happens(
    supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    await supervisors.start("decode-5", "decode")
    store.away = True
    controller = Controller(supervisors, store, ONE_EACH)
    running = asyncio.ensure_future(controller.run())
    await until(controller, lambda status: "the store is away" in str(status.problem))
    assert list(supervisors.running) == ["decode-5"]
    with pytest.raises(StoreUnavailable):
        await controller.scale({"decode": 1})
    running.cancel()


async def test_a_scale_that_cannot_be_stored_changes_nothing(
    controller: Controller, supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    store.away = True
    with pytest.raises(StoreUnavailable):
        await controller.scale({"decode": 5})
    assert controller.status().desired == ONE_EACH
    with pytest.raises(ConfigError):
        await controller.scale({"decode": -1})


async def test_stop_all_ends_everything_and_keeps_the_counts(
    controller: Controller, supervisors: FakeSupervisors, store: MemoryStore
) -> None:
    await adopted(controller, "prefill-0", "decode-0", "router-0")
    await asyncio.wait_for(controller.stop_all(), 5)
    assert supervisors.running == {}
    assert store.counts == ONE_EACH


async def test_waiting_for_a_change_ends_with_it_or_with_the_time(controller: Controller) -> None:
    status = await adopted(controller, "prefill-0", "decode-0", "router-0")
    assert (await controller.status_after(status.version, 0.01)).version == status.version
    waiting = asyncio.ensure_future(controller.status_after(status.version, 5))
    await controller.scale({"decode": 2})
    assert (await waiting).version > status.version
