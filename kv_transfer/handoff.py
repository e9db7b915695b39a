"""A hand-off: the KV of one prompt becoming usable on a decode worker (DESIGN §4.8). Sans I/O.

Every full block of the prompt is in one state; this table is the whole life of a block here:

    MISSING --read--> READING --copy--> COPYING --verified--> VERIFIED
       ^                |  |                |
       +----failed------+  +---give_up---+  +--mismatch--> MISSING
Verified positions only grow. An illegal move raises IntegrityError and changes nothing. Whatever goes wrong is counted
under a name of its own (docs/faults.md), here and in the counters of the worker.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cluster.core.errors import IntegrityError
from cluster.core.keys import BlockKey
from cluster.stubs.link_pb2 import OfferedBlock


class State(Enum):
    """Where one block of the hand-off is."""

    MISSING = auto()
    READING = auto()
    COPYING = auto()
    VERIFIED = auto()


MOVES: dict[tuple[State, str], State] = {
    (State.MISSING, "read"): State.READING,
    (State.READING, "failed"): State.MISSING,
    (State.READING, "give_up"): State.MISSING,
    (State.READING, "copy"): State.COPYING,
    (State.COPYING, "verified"): State.VERIFIED,
    (State.COPYING, "mismatch"): State.MISSING,
}
REREADS = 1  # a block whose digest differs is read once more, when its holder still vouches for it


@dataclass(frozen=True, slots=True)
class Verified:
    """A block whose copy proved right: its index in the prompt, its key and its digest."""

    index: int
    key: BlockKey
    digest: bytes


class HandOff:
    """The blocks of one prompt, from the first one this worker lacks to the last full one."""

    def __init__(
        self, keys: Sequence[BlockKey], first: int, block_size: int, totals: Counter[str] | None = None
    ) -> None:
        """`keys`: of every full block of the prompt, derived here; blocks before `first` are here already.

        `totals`: the worker's counters, to which this hand-off's outcomes are added as they happen.
        """
        self.keys = list(keys)
        self.first = first
        self._block_size = block_size
        self._state = [State.VERIFIED] * first + [State.MISSING] * (len(keys) - first)
        self._offered: dict[int, OfferedBlock] = {}
        self._doubted: set[int] = set()  # a mismatch was seen; wait for the holder's word
        self._mismatches: Counter[int] = Counter()
        self._reads: dict[int, list[int]] = {}
        self._end_of_offers = 0  # of the present holder: the index behind the last block it has offered
        self.outcomes: Counter[str] = Counter()
        self._totals = totals if totals is not None else Counter()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return all(state is State.VERIFIED for state in self._state)

    @property
    def verified_blocks(self) -> int:
        """Length of the verified prefix, in blocks."""
        for index, state in enumerate(self._state):
            if state is not State.VERIFIED:
                return index
        return len(self._state)

    @property
    def behind_a_gap(self) -> int:
        """Verified blocks that are of no use as long as one before them is missing."""
        return self._state[self.verified_blocks :].count(State.VERIFIED)

    @property
    def reads(self) -> list[int]:
        """Ids of the reads and copies in progress."""
        return list(self._reads)

    def states(self) -> list[State]:
        return list(self._state)

    # -- events ---------------------------------------------------------------------------------------------------

    def offer(self, first_position: int, blocks: Sequence[OfferedBlock]) -> bool:
        """The holder offers blocks from an absolute position on. False: the offer is malformed or names other content.

        Blocks that are here already, or under way, are ignored; an offer may come twice and in any order (FAULTS C09).
        """
        start, rest = divmod(first_position, self._block_size)
        if rest or start < 0 or start + len(blocks) > len(self.keys):
            self._count("offer_out_of_range")
            return False
        for index, block in enumerate(blocks, start):
            if block.block < 0:
                self._count("offer_out_of_range")
                return False
            if block.key != self.keys[index]:
                self._count("offer_wrong_key")
                return False
        repeated = 0
        for index, block in enumerate(blocks, start):
            repeated += index in self._offered or self._state[index] is not State.MISSING
            if self._state[index] is State.MISSING:
                self._offered[index] = block
                self._doubted.discard(index)
        if repeated:
            self._count("offer_repeated", repeated)
        if start < self._end_of_offers and repeated < len(blocks):
            self._count("offer_out_of_order")
        self._end_of_offers = max(self._end_of_offers, start + len(blocks))
        return True

    def next_range(self, limit: int) -> list[tuple[int, OfferedBlock]]:
        """The first run of at most `limit` consecutive blocks that are offered and missing."""
        run: list[tuple[int, OfferedBlock]] = []
        for index in range(self.first, len(self._state)):
            ready = self._state[index] is State.MISSING and index in self._offered and index not in self._doubted
            if ready and len(run) < limit:
                run.append((index, self._offered[index]))
            elif run:
                break
        return run

    def start_read(self, read_id: int, indexes: Sequence[int]) -> None:
        self._move(indexes, "read")
        self._reads[read_id] = list(indexes)

    def read_done(self, read_id: int) -> list[int]:
        """The bytes are in the slot and will be copied; returns the block indexes, in slot order."""
        indexes = self._indexes(read_id)
        self._move(indexes, "copy")
        return indexes

    def read_failed(self, read_id: int) -> None:
        """The read ended without bytes: its blocks are missing, and wanted again from this holder at most once more."""
        self._missing_again(read_id, "failed")
        self._count("read_failed")

    def give_up(self, read_id: int) -> None:
        """Stop waiting for a read. Always safe: it ends in staging."""
        self._missing_again(read_id, "give_up")
        self._count("read_given_up")

    def copy_done(self, read_id: int, digests: Sequence[bytes]) -> tuple[list[Verified], list[OfferedBlock]]:
        """Judge the copies by the offered digests. Returns (verified, doubted blocks to recheck with the holder)."""
        verified, doubted = [], []
        indexes = self._indexes(read_id)
        if len(digests) != len(indexes) or any(self._state[index] is not State.COPYING for index in indexes):
            raise IntegrityError(f"{len(digests)} digests cannot judge read {read_id} of blocks {indexes}")
        del self._reads[read_id]
        for index, digest in zip(indexes, digests, strict=True):
            offered = self._offered[index]
            if digest == offered.digest:
                self._move([index], "verified")
                self._count("kv_blocks_verified")
                verified.append(Verified(index, self.keys[index], digest))
            else:
                self._move([index], "mismatch")
                self._count("digest_mismatch")
                self._mismatches[index] += 1
                self._doubted.add(index)
                doubted.append(offered)
        return verified, doubted

    def rechecked(self, block: int, generation: int, *, current: bool) -> bool:
        """The holder's word on a doubted block. False: this holder cannot supply it (stale, or wrong twice)."""
        for index in list(self._doubted):
            offered = self._offered[index]
            if (offered.block, offered.generation) != (block, generation):
                continue
            self._doubted.discard(index)
            if current and self._mismatches[index] <= REREADS:
                self._count("kv_blocks_reread")
                return True
            del self._offered[index]
            self._count("kv_blocks_corrupt" if current else "kv_blocks_stale")
            return False
        return True

    def forget_holder(self) -> list[int]:
        """Another holder, or nobody, supplies the rest: drop all offers. Returns reads to give up (copies go on)."""
        copying = {i for i, state in enumerate(self._state) if state is State.COPYING}
        self._offered = {i: offer for i, offer in self._offered.items() if i in copying}
        self._doubted.clear()
        self._mismatches.clear()
        self._end_of_offers = 0
        return [read for read, indexes in self._reads.items() if self._state[indexes[0]] is State.READING]

    def _count(self, outcome: str, times: int = 1) -> None:
        self.outcomes[outcome] += times
        self._totals[outcome] += times

    def _missing_again(self, read_id: int, event: str) -> None:
        self._move(self._indexes(read_id), event)
        del self._reads[read_id]

    def _indexes(self, read_id: int) -> list[int]:
        indexes = self._reads.get(read_id)
        if indexes is None:
            raise IntegrityError(f"read {read_id} is not in progress: it cannot end")
        return indexes

    def _move(self, indexes: Sequence[int], event: str) -> None:
        targets = []
        for index in indexes:
            target = MOVES.get((self._state[index], event))
            if target is None:
                raise IntegrityError(f"block {index} is {self._state[index].name}: it cannot {event}")
            targets.append(target)
        for index, target in zip(indexes, targets, strict=True):
            self._state[index] = target
