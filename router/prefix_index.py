"""Which workers hold which prefix: one compact table of all routing blocks in the cluster, bounded from the start.

A *routing block* is every k-th block of a chain; its key names the whole prefix that ends with it (DESIGN §4.2). The
table has two columns: a 64-bit tag, and a 64-bit mask of the workers that hold the block.

1. *join*    a worker, or a new life of one, gets a number: a bit of the mask in one of 255 groups of 64
2. *store*, *remove*   set or clear its bit, a batch of packed keys at a time
3. *match*   the masks of a prompt's keys, and-ed from the first on: where a bit goes out its worker's prefix ends
4. *leave*   the worker's bit counts no more, at once; `sweep` clears it slot by slot, and then the number is free again

A key may stand in one of two buckets of WAYS slots, chosen by its second half; it goes where more is free, so that a
table that is FULL still finds room for every key. Its tag is 56 bits of its first half and the number of the group; tag
0 is an empty slot. Nothing is ever moved and there are no tombstones, so no step takes longer than its batch. When both
buckets are full the key is refused and counted: what is known is not given up for it. So is what goes beyond the
number of blocks that its worker has, lest one that raves fills the table for all.

The index may be wrong - a key refused, two keys taken for one (about 2^-70 a pair) - and then costs time, never a right
answer: workers compare whole keys of their own.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.core.errors import IntegrityError
from cluster.core.keys import KEY_BYTES, BlockKey

WAYS = 8  # slots of a bucket: their tags are one cache line
FULL = 0.625  # of the slots, with as many entries as the table was made for
SWEEP_SLOTS = 1 << 17  # looked at by one `sweep`
MAX_WORKERS = 255 * 64
_BITS = 64
_GROUP = np.uint64(255)
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_SPREAD = 0x9E37_79B9_7F4A_7C15  # a group's own buckets, for a key that very many workers hold
_ONE = np.uint64(1)

Words = NDArray[np.uint64]
Slots = NDArray[np.intp]
Flags = NDArray[np.bool_]


class PrefixIndex:
    """Made for so many `entries`, one for each worker that holds a routing block; 26 bytes each, taken from the system
    as they are first used.

    Packed keys have KEY_BYTES each. Every method raises IntegrityError for a worker that has not joined.
    """

    def __init__(self, entries: int, *, sweep_slots: int = SWEEP_SLOTS) -> None:
        self.capacity = entries
        self.refused = 0
        self._sweep_slots = sweep_slots
        self._buckets = max(2, -(-int(entries / FULL) // WAYS))
        self._tags: Words = np.zeros((self._buckets, WAYS), np.uint64)
        self._masks: Words = np.zeros(self._buckets * WAYS, np.uint64)
        self._live: Words = np.zeros(MAX_WORKERS // _BITS + 1, np.uint64)  # who counts, by the group's number in tags
        self._counts: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self._free: list[int] = []
        self._made = 0  # numbers given out so far
        self._left: list[int] = []  # wait for the next sweep
        self._swept: list[int] = []  # their bits are being cleared
        self._cursor = 0

    # -- workers ----------------------------------------------------------------------------------------------------

    def join(self, most: int) -> int | None:
        """A number for a worker that can hold so many blocks, and of which none is known yet. None: all are taken."""
        if self._free:
            worker = heapq.heappop(self._free)
        elif self._made < MAX_WORKERS:
            worker = self._made
            self._made += 1
        else:
            return None
        self._counts[worker], self._most[worker] = 0, max(0, most)
        self._live[_group(worker)] |= _bit(worker)
        return worker

    def leave(self, worker: int) -> None:
        """All that is known of it is void."""
        self.count(worker)
        del self._counts[worker], self._most[worker]
        self._live[_group(worker)] &= ~_bit(worker)
        self._left.append(worker)

    def count(self, worker: int) -> int:
        """How many routing blocks it is known to hold."""
        if worker not in self._counts:
            raise IntegrityError(f"worker {worker} has not joined")
        return self._counts[worker]

    @property
    def leaving(self) -> int:
        """Numbers that left and are not free again yet."""
        return len(self._left) + len(self._swept)

    @property
    def entries(self) -> int:
        """Pairs of a key and a worker."""
        return sum(self._counts.values())

    def describe(self) -> dict[str, int]:
        """For people and metrics."""
        return {"entries": self.entries, "capacity": self.capacity, "refused": self.refused}

    # -- keys -------------------------------------------------------------------------------------------------------

    def store(self, worker: int, packed: bytes) -> None:
        """The worker holds these blocks. One that finds no room is left out and counted in `refused`."""
        held = self.count(worker)
        room = self._most[worker] - held
        tags, buckets = self._look_up(packed, _group(worker))
        tags, first = np.unique(tags, return_index=True)
        buckets, bit = buckets[first], _bit(worker)
        found, slots = self._find(tags, buckets)
        shared = slots[(self._masks[slots] & bit) == 0]  # which others hold
        unknown = np.flatnonzero(~found)
        self.refused += max(0, len(shared) + len(unknown) - room)
        shared = shared[:room]
        unknown = unknown[: room - len(shared)]
        self._masks[shared] |= bit
        self._counts[worker] = held + len(shared) + self._enter(tags[unknown], buckets[unknown], bit)

    def remove(self, worker: int, packed: bytes) -> None:
        """The worker holds these blocks no longer; of no effect for those it was not known to hold."""
        self.count(worker)
        bit = _bit(worker)
        _, slots = self._find(*self._look_up(packed, _group(worker)))
        held = np.unique(slots[(self._masks[slots] & bit) != 0])
        self._clear(held, ~bit)
        self._counts[worker] -= len(held)

    def match(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """How many of a chain's routing blocks, from the first on, each worker holds; without those that hold none."""
        depths: dict[int, int] = {}
        packed = b"".join(keys)
        for first in range(0, self._made if keys else 0, _BITS):
            group = _group(first)
            left = int(self._live[group])
            if not left:
                continue
            found, slots = self._find(*self._look_up(packed, group))
            masks = np.zeros(len(keys) + 1, np.uint64)
            masks[:-1][found] = self._masks[slots]
            for depth, mask in enumerate(masks.tolist()):
                gone = left & ~mask
                left &= mask
                while gone and depth:
                    lowest = gone & -gone
                    depths[first + lowest.bit_length() - 1] = depth
                    gone ^= lowest
                if not left:
                    break
        return depths

    # -- numbers that were left -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Clear the bits of workers that left in the next few slots. To be called several times a second."""
        if not self._swept:
            self._swept, self._left, self._cursor = self._left, [], 0
        if not self._swept:
            return
        drop = np.zeros_like(self._live)
        for worker in self._swept:
            drop[_group(worker)] |= _bit(worker)
        end = self._cursor + self._sweep_slots
        slots = self._cursor + np.flatnonzero(self._masks[self._cursor : end] & np.bitwise_or.reduce(drop))
        self._clear(slots, ~drop[self._tags.reshape(-1)[slots] & _GROUP])
        self._cursor = end
        if end >= len(self._masks):
            for worker in self._swept:
                heapq.heappush(self._free, worker)  # the least first: as few groups as will do
            self._swept = []

    def check_integrity(self) -> None:
        """Audit every slot. Raises IntegrityError naming the first contradiction."""
        tags = self._tags.reshape(-1)
        if ((tags == 0) != (self._masks == 0)).any():
            raise IntegrityError("a slot is empty by its tag or its mask alone")
        known = self._counts.keys() | set(self._left) | set(self._swept)
        if known & set(self._free) or len(known) + len(self._free) != self._made:
            raise IntegrityError("a number is free and in use, or neither")
        for worker in range(self._made):
            held = tags[((tags & _GROUP) == _group(worker)) & ((self._masks & _bit(worker)) != 0)]
            live = bool(self._live[_group(worker)] & _bit(worker))
            if live != (worker in self._counts) or (worker in self._free and len(held)):
                raise IntegrityError(f"worker {worker} does not count, and holds {len(held)} blocks")
            if live and len(held) != self._counts[worker]:
                raise IntegrityError(f"worker {worker} holds {len(held)} blocks, not {self._counts[worker]}")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _look_up(self, packed: bytes, group: int) -> tuple[Words, Slots]:
        """Tags [n], and the buckets [n, 2] where they may stand."""
        halves = np.frombuffer(packed, "<u8").reshape(-1, KEY_BYTES // 8)
        tags = (halves[:, 0] & ~_GROUP) | np.uint64(group)
        second = halves[:, 1] ^ np.uint64(group * _SPREAD & 0xFFFF_FFFF_FFFF_FFFF)
        buckets = np.empty((len(tags), 2), np.uint64)
        buckets[:, 0] = second & _LOW
        buckets[:, 1] = second >> _HALF
        return tags, ((buckets * np.uint64(self._buckets)) >> _HALF).astype(np.intp)

    def _find(self, tags: Words, buckets: Slots) -> tuple[Flags, Slots]:
        """Which tags stand in the table [n], and where those do [found]."""
        hits = (self._tags.take(buckets, axis=0) == tags[:, None, None]).reshape(len(tags), 2 * WAYS)
        at = hits.argmax(axis=1)
        rows = np.arange(len(tags))
        found = hits[rows, at]
        return found, _slots(buckets, rows, at)[found]

    def _enter(self, tags: Words, buckets: Slots, bit: np.uint64) -> int:
        """Put tags that stand nowhere into free slots. Returns how many found room."""
        entered = 0
        flat = self._tags.reshape(-1)
        while len(tags):
            rows = np.arange(len(tags))
            free = self._free_slots(buckets)
            emptier = free.sum(axis=2).argmax(axis=1)
            at = free[rows, emptier].argmax(axis=1)
            room = free[rows, emptier, at]
            self.refused += int(np.count_nonzero(~room))
            slots = _slots(buckets, rows, emptier * WAYS + at)[room]
            tags, buckets = tags[room], buckets[room]
            flat[slots] = tags  # of several for one slot the last stays; the others look again
            won = flat[slots] == tags
            self._masks[slots[won]] = bit
            entered += int(np.count_nonzero(won))
            tags, buckets = tags[~won], buckets[~won]
        return entered

    def _free_slots(self, buckets: Slots) -> Flags:
        """[n, 2, WAYS]: empty, or, where a bucket pair has no empty slot, known only to be of workers that left."""
        tags = self._tags.take(buckets, axis=0)
        free: Flags = tags == 0
        if not free.any(axis=(1, 2)).all():
            masks = self._masks.reshape(-1, WAYS).take(buckets, axis=0)
            free |= (masks & self._live[tags & _GROUP]) == 0
        return free

    def _clear(self, slots: Slots, keep: Words | np.uint64) -> None:
        """Keep only these bits of each slot; one without any is empty."""
        masks = self._masks[slots] & keep
        self._masks[slots] = masks
        self._tags.reshape(-1)[slots[masks == 0]] = 0


def _group(worker: int) -> int:
    return worker // _BITS + 1


def _bit(worker: int) -> np.uint64:
    return _ONE << np.uint64(worker % _BITS)


def _slots(buckets: Slots, rows: Slots, at: Slots) -> Slots:
    """The slot at place `at` of [2 x WAYS] of each row's two buckets."""
    return buckets[rows, at // WAYS] * WAYS + at % WAYS
