"""What every transport promises (engine/wire.py): in process, NIXL over shared memory (CMA), NIXL over TCP.

A reader's wire thread in this process, a holder's in another one (for NIXL). A link is made anew for each test.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from engine.messages import AddPeer, DropPeer, PeerAdded, PeerFailed, Read, ReadDone, ReadFailed
from kv_transfer.transports.nixl import WARM_TIMEOUT_S
from tests.contract.kv_holder import BLOCK_BYTES, BLOCKS, SLOWNESS, Holder, LocalHolder, ProcessHolder
from tests.contract.kv_reader import CONTENT, PER_SLOT, QUIET_S, SLOTS, UNTOUCHED, World, make_world


@pytest.fixture(scope="module", params=["inprocess", "cma", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from make_world(request.param)


@pytest.fixture(scope="module")
def shared_holder(world: World) -> Holder:
    return world.start_holder()


@pytest.fixture
def holder(world: World, shared_holder: Holder) -> Iterator[Holder]:
    """A holder that serves, and a warm link to it."""
    shared_holder.serve(True)
    added = world.add(shared_holder)
    assert isinstance(added, PeerAdded), added
    world.staging.fill(UNTOUCHED)
    yield shared_holder
    world.wire.submit(DropPeer(shared_holder.agent))


@pytest.fixture
def process(holder: Holder) -> ProcessHolder:
    """The holder, where it is a process of its own."""
    if not isinstance(holder, ProcessHolder):
        pytest.skip("the holder is this process")
    return holder


def test_a_link_is_measured(world: World, holder: Holder) -> None:
    added = world.add(holder)
    assert isinstance(added, PeerAdded)
    assert added.peer == holder.agent
    assert added.needs_polling == (world.kind == "tcp")
    assert 0.001 < added.gb_per_s / SLOWNESS < 1000


def test_bytes_land_in_order_and_nowhere_else(world: World, holder: Holder) -> None:
    world.read(1, holder, range(20, 20 + PER_SLOT), 3)
    world.done(1)
    assert world.landed(3, range(20, 20 + PER_SLOT))
    assert (np.delete(world.staging, 3, axis=0) == UNTOUCHED).all()


def test_ranges_are_put_back_to_back(world: World, holder: Holder) -> None:
    flat = CONTENT.reshape(-1)
    parts = [(5 * BLOCK_BYTES + 8, 24), (0, 3 * BLOCK_BYTES), (flat.nbytes - 1, 1), (8, BLOCK_BYTES)]
    world.read_ranges(1, holder, [(holder.address + offset, size) for offset, size in parts], 0)
    world.done(1)
    want = np.concatenate([flat[offset : offset + size] for offset, size in parts])
    assert np.array_equal(world.staging[0, : want.nbytes], want)
    assert (world.staging[0, want.nbytes :] == UNTOUCHED).all()


def test_a_full_slot(world: World, holder: Holder) -> None:
    world.read_ranges(1, holder, [(holder.address, world.staging.shape[1])], 7)
    world.done(1)
    assert world.landed(7, range(PER_SLOT))


def test_several_slots_at_once(world: World, holder: Holder) -> None:
    for slot in range(SLOTS):
        world.read(slot, holder, range(slot, slot + PER_SLOT), slot)
    world.done(*range(SLOTS))
    assert all(world.landed(slot, range(slot, slot + PER_SLOT)) for slot in range(SLOTS))


def test_what_cannot_be_read_fails_and_touches_nothing(world: World, holder: Holder) -> None:
    pool_end = holder.address + BLOCKS * BLOCK_BYTES
    size = world.staging.shape[1]
    ranges: list[tuple[list[tuple[int, int]], int, str]] = [
        ([], 0, "fit a slot"),
        ([(holder.address, size), (holder.address, 1)], 0, "fit a slot"),
        ([(holder.address, 0)], 0, "not in the pool"),
        ([(holder.address, -8)], 0, "not in the pool"),
        ([(holder.address - 8, 16)], 0, "not in the pool"),
        ([(holder.address, 8), (pool_end - 8, 16)], 0, "not in the pool"),
        ([(holder.staging_address, 8)], 0, "not in the pool"),
        ([(holder.address, 8)], SLOTS, "slot"),
        ([(holder.address, 8)], -1, "slot"),
    ]
    for read_id, (bad, slot, reason) in enumerate(ranges):
        world.read_ranges(read_id, holder, bad, slot)
        assert reason in world.refused(read_id)
    world.wire.submit(Read(99, "nobody", [(holder.address, 8)], 0))
    assert "nobody" in world.refused(99)
    assert (world.staging == UNTOUCHED).all()


def test_a_peer_that_is_not_who_it_says(world: World, holder: Holder) -> None:
    whole = holder.metadata
    for metadata in (b"", b"12345678", whole[:-40], whole[:90] + bytes(20) + whole[110:], os.urandom(64)):
        world.wire.submit(AddPeer("another", metadata, holder.address))
        assert isinstance(world.next(), PeerFailed)
    world.wire.submit(AddPeer("another", holder.metadata, holder.address))
    failed = world.next()
    assert isinstance(failed, PeerFailed)
    assert failed.peer == "another"
    world.read(1, holder, range(2), 0)  # the true one is as readable as before
    world.done(1)
    assert world.landed(0, range(2))


def test_a_dropped_peer_cannot_be_read_until_it_is_added_again(world: World, holder: Holder) -> None:
    world.wire.submit(DropPeer(holder.agent))
    world.wire.submit(DropPeer("nobody"))
    world.read(1, holder, range(2), 0)
    assert holder.agent in world.refused(1)
    assert isinstance(world.add(holder), PeerAdded)
    world.read(2, holder, range(2), 0)
    world.done(2)
    assert world.landed(0, range(2))


def test_a_holder_that_overwrites_harms_only_the_slot_read_into(world: World, holder: Holder) -> None:
    world.read(0, holder, range(PER_SLOT), 0)
    world.done(0)
    holder.overwrite(True)
    for read_id in range(1, 20):
        world.read(read_id, holder, range(PER_SLOT), 1)
        world.done(read_id)
    holder.overwrite(False)
    torn, whole = world.staging[1].reshape(PER_SLOT, BLOCK_BYTES), CONTENT[:PER_SLOT]
    assert ((torn == whole) | (torn == ~whole)).all()
    assert world.landed(0, range(PER_SLOT))
    assert (world.staging[2:] == UNTOUCHED).all()


def test_an_idle_wire_thread_sleeps(world: World, holder: Holder) -> None:
    world.read(1, holder, range(PER_SLOT), 0)
    world.done(1)
    holder.serve(False)
    assert isinstance(holder, LocalHolder | ProcessHolder)
    threads = wire_threads() if isinstance(holder, LocalHolder) else [*wire_threads(), *tasks(holder.pid)]
    woken: list[int] = []
    while len(woken) < 20 and min(woken, default=5) > 4:  # what was still on its way comes first
        before = wake_ups(threads)
        assert world.silent()
        woken.append(wake_ups(threads) - before)
    assert min(woken) <= 4, f"within {QUIET_S} s each: {woken}; polling each 0.2 ms would be hundreds"


def wire_threads() -> list[Path]:
    return [Path(f"/proc/self/task/{t.native_id}") for t in threading.enumerate() if t.name == "wire"]


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def wake_ups(threads: list[Path]) -> int:
    lines = [line for task in threads for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_a_frozen_holder(world: World, process: ProcessHolder) -> None:
    """Shared memory does not need it. Over TCP the read stays in progress, its slot taken, until the holder thaws."""
    process.freeze()
    try:
        world.read(1, process, range(PER_SLOT), 0)
        if world.kind == "tcp":
            assert world.silent()
            assert world.transport is not None
            assert world.transport.busy
    finally:
        process.thaw()
    world.done(1)
    assert world.landed(0, range(PER_SLOT))


def test_a_read_outlives_the_drop_of_its_peer(world: World, process: ProcessHolder) -> None:
    process.freeze()
    try:
        world.read(1, process, range(PER_SLOT), 0)
        world.wire.submit(DropPeer(process.agent))
        world.read(2, process, range(2), 1)
        if world.kind == "tcp":
            assert "unknown" in world.refused(2)
            assert world.silent()  # in progress, not failed: the bytes are still to come
    finally:
        process.thaw()
    world.done(1)
    if world.kind != "tcp":
        assert "unknown" in world.refused(2)
    assert world.landed(0, range(PER_SLOT))
    assert (world.staging[1] == UNTOUCHED).all()
    assert isinstance(world.add(process), PeerAdded)


def test_a_link_to_a_frozen_holder_does_not_get_warm(world: World, process: ProcessHolder) -> None:
    """Over CMA it may, where UCX has kept what it knew of the process: then it is as good as any other."""
    world.wire.submit(DropPeer(process.agent))
    process.freeze()
    try:
        world.wire.submit(AddPeer(process.agent, process.metadata, process.address))
        answer = world.early()
        if answer is None:
            world.clock.skipped += WARM_TIMEOUT_S
            answer = world.next()
        if world.kind == "cma" and isinstance(answer, PeerAdded):
            world.read(1, process, range(PER_SLOT), 0)
            world.done(1)
            assert world.landed(0, range(PER_SLOT))
        else:
            assert isinstance(answer, PeerFailed), answer
            assert answer.peer == process.agent
            assert "not warm" in answer.reason
        assert world.transport is not None
        assert not world.transport.busy
    finally:
        process.thaw()
    assert isinstance(world.add(process), PeerAdded)
    world.read(2, process, range(PER_SLOT), 1)
    world.done(2)
    assert world.landed(1, range(PER_SLOT))


def test_nixl_itself_refuses_what_lies_outside_the_pool(world: World, process: ProcessHolder) -> None:
    """A peer that lies about its pool: our own check passes, NIXL's error becomes the read's failure."""
    agent, _, nixl, digest, device = msgspec.msgpack.decode(process.metadata)
    lying = msgspec.msgpack.encode([agent, 1 << 46, nixl, digest, device])
    world.wire.submit(AddPeer(process.agent, lying, process.address))
    assert isinstance(world.next(), PeerAdded)
    for address in (process.address + BLOCKS * BLOCK_BYTES - 8, process.staging_address):
        if address > process.address:
            world.read_ranges(1, process, [(address, 16)], 0)
            assert "nixl" in world.refused(1)


def test_listeners_are_pinned(world: World, process: ProcessHolder) -> None:
    sockets = [c for c in psutil.Process(process.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {s.laddr.ip for s in sockets} == {"127.0.0.1"}
    if world.kind == "tcp":
        assert all(21000 <= s.laddr.port <= 21999 for s in sockets)


def test_a_holder_dies_while_it_is_read_and_comes_back(world: World, holder: Holder) -> None:
    """Runs last: it ends the shared holder. Every read ends, done or failed, and the reader lives."""
    if isinstance(holder, ProcessHolder) and world.kind == "tcp":
        holder.freeze()  # so that the reads are in progress for certain when it dies
    for read_id in range(SLOTS):
        world.read(read_id, holder, range(PER_SLOT), read_id)
    holder.kill()
    ended = [world.next() for _ in range(SLOTS)]
    assert all(isinstance(report, ReadDone | ReadFailed) for report in ended), ended
    if world.kind == "tcp":
        assert all(isinstance(report, ReadFailed) for report in ended), ended
    world.read(90, holder, range(2), 0)
    world.refused(90)
    world.wire.submit(DropPeer(holder.agent))
    restarted = world.start_holder()
    restarted.serve(True)
    assert restarted.agent != holder.agent
    assert isinstance(world.add(restarted), PeerAdded)
    world.read(91, restarted, range(5, 5 + PER_SLOT), 2)
    world.done(91)
    assert world.landed(2, range(5, 5 + PER_SLOT))


def test_a_link_below_what_is_required_is_refused(world: World) -> None:
    """The reader may use shared memory and must; this holder offers TCP only."""
    if world.kind != "cma":
        pytest.skip("requires shm")
    slow = world.start_holder(require="tcp", devices="lo")
    slow.serve(True)
    failed = world.add(slow)
    assert isinstance(failed, PeerFailed)
    assert "shm is required" in failed.reason
    world.read(1, slow, range(2), 0)
    assert slow.agent in world.refused(1)
