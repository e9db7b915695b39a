"""A hand-off: the KV of one prompt becoming usable on a decode worker (DESIGN §4.8). Sans I/O.

Every full block of the prompt is in one state; this table is the whole life of a block here:

    MISSING --read--> READING --copy--> COPYING --verified--> VERIFIED
       ^                |  |                |
       +----failed------+  +---give_up---+  +--mismatch--> MISSING
Verified positions only grow, with one exception: what a holder computed from a block that proved rotten is not what its
key says, whatever its digest (`distrust`). Each read is judged by what was offered for it: its holder may have been
left meanwhile. An illegal move raises IntegrityError and changes nothing. Whatever goes wrong is counted
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
    (State.VERIFIED, "distrust"): State.MISSING,
}
REREADS = 1  # a block whose digest differs is read once more, when its holder still vouches for it


@dataclass(frozen=True, slots=True)
class Verified:
    """A block whose copy proved right: its index in the prompt, its key and its digest as it is kept here."""

    index: int
    key: BlockKey
    digest: bytes


class Word(Enum):
    """What comes of a holder's word on a block that was doubted."""

    GOOD = auto()  # it is read once more
    STALE = auto()  # the holder does not have it any more
    CORRUPT = auto()  # wrong in the holder's memory, or twice on the way


@dataclass(slots=True)
class _Read:
    """Blocks under way, as they were offered. From index `distrusted` on they may be computed from what is wrong."""

    holder: int
    offers: dict[int, OfferedBlock]
    distrusted: int

    @property
    def indexes(self) -> list[int]:
        return list(self.offers)


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
        self._reads: dict[int, _Read] = {}
        self._holder = 0  # counts up: the present one
        self._source: dict[int, int] = {}  # whose each verified block was
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

    def offer(
        self, first_position: int, blocks: Sequence[OfferedBlock], keys: Sequence[BlockKey] | None = None
    ) -> bool:
        """The holder offers blocks from an absolute position on. False: the offer is malformed or names other content.

        `keys`: what the holder calls the prompt's blocks, where that is not what they are called here.
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
            if block.key != (keys or self.keys)[index]:
                self._count("offer_wrong_key")
                return False
        repeated = 0
        for index, block in enumerate(blocks, start):
            state, known = self._state[index], index in self._offered
            repeated += known or state is State.VERIFIED
            if state is State.MISSING or (state is State.COPYING and not known):  # the copy is of another holder's
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
        offers = {index: self._offered[index] for index in indexes}
        self._reads[read_id] = _Read(self._holder, offers, len(self.keys))

    def read_done(self, read_id: int) -> list[int]:
        """The bytes are in the slot and will be copied; returns the block indexes, in slot order."""
        indexes = self._under_way(read_id).indexes
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

    def copy_done(
        self, read_id: int, digests: Sequence[bytes], kept: Sequence[bytes] | None = None
    ) -> tuple[list[Verified], list[OfferedBlock]]:
        """Judge the copies by the offered digests. Returns (verified, doubted blocks to recheck with the holder).

        `kept`: digests of what became of the copies here, where they were converted.
        """
        verified, doubted = [], []
        read = self._under_way(read_id)
        kept = digests if kept is None else kept
        copying = all(self._state[index] is State.COPYING for index in read.offers)
        if not len(digests) == len(kept) == len(read.offers) or not copying:
            raise IntegrityError(f"{len(digests)} digests cannot judge read {read_id} of blocks {read.indexes}")
        del self._reads[read_id]
        for (index, offered), digest, own in zip(read.offers.items(), digests, kept, strict=True):
            if digest == offered.digest and index < read.distrusted:
                self._move([index], "verified")
                self._source[index] = read.holder
                self._count("kv_blocks_verified")
                verified.append(Verified(index, self.keys[index], own))
                continue
            self._move([index], "mismatch")
            if digest == offered.digest:  # proved and taken back at once
                self._count("kv_blocks_verified")
                self._count("kv_blocks_distrusted")
            else:
                self._count("digest_mismatch")
            if read.holder == self._holder:  # else nobody is left to be asked
                self._mismatches[index] += 1
                self._doubted.add(index)
                doubted.append(offered)
        return verified, doubted

    def rechecked(self, block: int, generation: int, *, current: bool, corrupt: bool = False) -> tuple[Word, int]:
        """The holder's word on a doubted block, and that block's index. Unless GOOD, this holder cannot supply it."""
        for index in list(self._doubted):
            offered = self._offered[index]
            if (offered.block, offered.generation) != (block, generation):
                continue
            self._doubted.discard(index)
            if current and self._mismatches[index] <= REREADS:
                self._count("kv_blocks_reread")
                return Word.GOOD, index
            del self._offered[index]
            word = Word.CORRUPT if current or corrupt else Word.STALE
            self._count("kv_blocks_corrupt" if word is Word.CORRUPT else "kv_blocks_stale")
            return word, index
        return Word.GOOD, 0

    def distrust(self, index: int) -> list[int]:
        """Something in the present holder's memory is wrong: what it offered from block `index` on may be as well.

        Returns the indexes of verified blocks that are missing again by this; copies under way will not be verified.
        """
        after = [i for i, source in self._source.items() if source == self._holder and i >= index]
        self._move(after, "distrust")
        for i in after:
            del self._source[i]
        self._count("kv_blocks_distrusted", len(after))
        for read in self._reads.values():
            if read.holder == self._holder:
                read.distrusted = min(read.distrusted, index)
        return after

    def forget_holder(self) -> list[int]:
        """Another holder, or nobody, supplies the rest: drop all offers. Returns reads to give up (copies go on)."""
        self._offered.clear()
        self._doubted.clear()
        self._mismatches.clear()
        self._end_of_offers = 0
        self._holder += 1
        return [read for read, held in self._reads.items() if self._state[held.indexes[0]] is State.READING]

    def _count(self, outcome: str, times: int = 1) -> None:
        self.outcomes[outcome] += times
        self._totals[outcome] += times

    def _missing_again(self, read_id: int, event: str) -> None:
        self._move(self._under_way(read_id).indexes, event)
        del self._reads[read_id]

    def _under_way(self, read_id: int) -> _Read:
        read = self._reads.get(read_id)
        if read is None:
            raise IntegrityError(f"read {read_id} is not in progress: it cannot end")
        return read

    def _move(self, indexes: Sequence[int], event: str) -> None:
        targets = []
        for index in indexes:
            target = MOVES.get((self._state[index], event))
            if target is None:
                raise IntegrityError(f"block {index} is {self._state[index].name}: it cannot {event}")
            targets.append(target)
        for index, target in zip(indexes, targets, strict=True):
            self._state[index] = target
