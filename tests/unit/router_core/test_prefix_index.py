"""The prefix index: a whole table of it, its limits, and workers that say what makes no sense."""

import random
from collections.abc import Callable

import pytest

from cluster.core.errors import IntegrityError
from cluster.core.keys import KeyChain, root_key
from cluster.stubs.watch_pb2 import Removed, Snapshot, Stored, WatchEvent
from router.placement import Shape
from router.prefix_index import MAX_WORKERS, PrefixIndex
from router.workers import Workers
from tests.unit.router_core.fakes import BLOCK, FakeWorker, believed

EVENTS: dict[str, Callable[[bytes], WatchEvent]] = {
    "snapshot": lambda keys: WatchEvent(snapshot=Snapshot(keys=keys)),
    "stored": lambda keys: WatchEvent(stored=Stored(keys=keys)),
    "removed": lambda keys: WatchEvent(removed=Removed(keys=keys)),
}


def keys_of(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("entries", [1000, 20_000])
def test_it_takes_as_many_entries_as_it_was_made_for(entries: int) -> None:
    index = PrefixIndex(entries)
    keys = keys_of(entries)
    for part in range(4):
        worker = index.join(entries)
        assert worker is not None
        index.store(worker, b"".join(keys[part::4]))
    index.check_integrity()
    assert index.describe() == {"entries": entries, "capacity": entries, "refused": 0}
    assert all(index.match([key]) == {at % 4: 1} for at, key in enumerate(keys[:200]))


def test_a_full_table_keeps_what_it_knows_and_counts_what_it_refuses() -> None:
    index = PrefixIndex(100)
    first, second = index.join(1000), index.join(1000)
    assert first is not None
    assert second is not None
    old, new = keys_of(100), keys_of(1000, seed=1)
    index.store(first, b"".join(old))
    index.store(second, b"".join(new))
    assert all(index.match([key]) == {first: 1} for key in old)
    assert index.refused == 1000 - index.count(second) > 0
    index.check_integrity()
    index.store(second, b"".join(old))
    assert index.match(old) == {first: 100, second: 100}, "a key that is known needs no room"


def test_room_of_a_worker_that_left_is_used_before_it_is_swept() -> None:
    index = PrefixIndex(100)
    old, new = keys_of(100), keys_of(100, seed=1)
    for keys in (old, new, old, new):
        worker = index.join(100)
        assert worker is not None
        index.store(worker, b"".join(keys))
        assert index.match(keys) == {worker: 100}
        index.check_integrity()
        index.leave(worker)
    assert index.refused == 0


def test_a_number_is_free_again_only_when_every_slot_was_swept() -> None:
    index = PrefixIndex(1000, sweep_slots=500)
    left, keys = index.join(100), keys_of(100)
    assert left is not None
    index.store(left, b"".join(keys))
    index.leave(left)
    seen = []
    for _ in range(4):
        seen.append(index.join(1))
        index.sweep()
    assert seen == [1, 2, 3, 4]
    assert index.join(1) == left
    assert index.match(keys) == {}
    index.check_integrity()


def test_a_worker_cannot_hold_more_than_it_has_blocks() -> None:
    index = PrefixIndex(1000)
    raving, other, odd = index.join(5), index.join(100), index.join(-7)
    assert raving is not None
    assert odd is not None
    assert other is not None
    keys = keys_of(100)
    index.store(other, b"".join(keys[:50]))
    index.store(raving, b"".join(keys))
    assert (index.count(raving), index.refused) == (5, 95)
    index.store(odd, b"".join(keys))
    assert (index.count(odd), index.refused) == (0, 195)
    index.store(other, b"".join(keys))
    assert index.count(other) == 100


def test_numbers_end_and_a_worker_without_one_has_nothing_cached() -> None:
    index = PrefixIndex(10)
    assert [index.join(1) for _ in range(MAX_WORKERS)][-1] == MAX_WORKERS - 1
    workers = Workers(3.0, 0.5, index)
    workers.add("d:1")
    view = workers.by_address["d:1"]
    key = keys_of(1)[0]
    for event in FakeWorker("d", "decode").hello(key):
        assert view.on_watch(event, 0.0)
    assert view.number is None
    assert believed(view, [key]) == set()
    assert workers.describe(0.0)[0]["cached_keys"] == 0


def test_only_who_has_joined_is_known() -> None:
    index = PrefixIndex(10)
    asks: list[Callable[[int], object]] = [
        index.count,
        index.leave,
        lambda worker: index.store(worker, b""),
        lambda worker: index.remove(worker, b""),
    ]
    for ask in asks:
        with pytest.raises(IntegrityError, match="worker 3 has not joined"):
            ask(3)
    assert index.match([]) == index.match(keys_of(3)) == {}


@pytest.mark.parametrize("kind", EVENTS)
def test_keys_that_are_cut_off_open_the_watch_again(kind: str) -> None:
    """And do nothing else to a router."""
    workers = Workers(3.0, 0.5, PrefixIndex(10))
    workers.add("d:1")
    view = workers.by_address["d:1"]
    for event in FakeWorker("d", "decode").hello():
        assert view.on_watch(event, 0.0)
    cut = EVENTS[kind](b"k" * 17)
    cut.sequence = 4
    assert not view.on_watch(cut, 0.0)
    assert view.watch.sequence == 3


@pytest.mark.parametrize("stride", [0, 1, 2, 5])
def test_a_hit_is_of_whole_routing_blocks(stride: int) -> None:
    """Each worker says how far apart its own are; 0 is who does not say."""
    workers = Workers(3.0, 0.5, PrefixIndex(1000))
    chain = KeyChain(root_key(b"weights"), BLOCK).extend(range(30 * BLOCK))
    every = max(1, stride)
    for name, blocks in (("p", 30), ("q", 13), ("r", 0)):
        fake = FakeWorker(name, "prefill")
        told = b"".join(chain[:blocks][every - 1 :: every])
        workers.add(fake.address)
        hello, *others = fake.hello(told)
        hello.hello.routing_stride = stride
        for event in (hello, *others):
            assert workers.by_address[fake.address].on_watch(event, 0.0)

    def keys(shape: Shape) -> list[bytes]:
        assert shape.fingerprint == b"weights"
        return chain[:29]

    found = workers.for_request(workers.loads(0.0), keys, set()).prefill
    assert [load.cached_tokens // BLOCK for load in found] == [29 // every * every, 13 // every * every, 0]


def test_a_new_life_and_a_worker_that_leaves_take_their_cache_along() -> None:
    index = PrefixIndex(1000)
    workers = Workers(3.0, 0.5, index)
    fake, keys = FakeWorker("d", "decode"), keys_of(40)
    workers.add(fake.address)
    view = workers.by_address[fake.address]
    for event in fake.hello(b"".join(keys)):
        view.on_watch(event, 0.0)
    assert index.entries == 40
    view.watch_closed()
    fake.restart()
    for event in fake.hello(b"".join(keys[:3])):
        view.on_watch(event, 0.0)
    assert believed(view, keys) == set(keys[:3])
    assert index.match(keys) == {view.number: 3}
    workers.remove(view)
    assert (index.entries, index.match(keys), workers.by_address) == (0, {}, {})
