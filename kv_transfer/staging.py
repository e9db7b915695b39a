"""Staging books: which slot of a worker's private receive memory is in whose hands (DESIGN §4).

A slot's life: free -> reading(id) -> copying(id) -> free. A read that is given up keeps its slot *set aside* until the
read itself has ended, because late bytes may still land there. Set-aside slots are replaced up to twice the size.
Pure bookkeeping.
"""

from dataclasses import dataclass

from cluster.core.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Held:
    """A slot in use by one read."""

    slot: int
    peer: str


class Staging:
    """Slots of equal size. `active` may be in use at once; the engine holds twice as many (`total`)."""

    def __init__(self, active: int) -> None:
        self.active = active
        self.total = 2 * active
        self._free = list(range(self.total - 1, -1, -1))
        self._reading: dict[int, Held] = {}
        self._set_aside: dict[int, Held] = {}
        self._copying: dict[int, int] = {}
        self._next_id = 0

    @property
    def in_use(self) -> int:
        """Slots of reads and copies that somebody waits for."""
        return len(self._reading) + len(self._copying)

    @property
    def set_aside(self) -> int:
        return len(self._set_aside)

    @property
    def set_aside_peers(self) -> list[str]:
        """Of each slot set aside, whom its read is from."""
        return [held.peer for held in self._set_aside.values()]

    @property
    def unended(self) -> list[str]:
        """Peers whose reads were given up and have not ended."""
        return sorted(set(self.set_aside_peers))

    def stuck(self, peer: str) -> bool:
        """Whether no read from `peer` can start before one that was given up has ended: waiting would be in vain."""
        set_aside = sum(held.peer == peer for held in self._set_aside.values())
        return set_aside >= self._per_peer or (not self._free and not self.in_use)

    @property
    def _per_peer(self) -> int:
        return max(1, self.active // 4)

    def start_read(self, peer: str) -> tuple[int, int] | None:
        """(read id, slot) for a new read from `peer`; None when that peer or the whole staging has enough in hand."""
        from_peer = sum(held.peer == peer for held in (*self._reading.values(), *self._set_aside.values()))
        if from_peer >= self._per_peer or self.in_use >= self.active or not self._free:
            return None
        self._next_id += 1
        held = Held(self._free.pop(), peer)
        self._reading[self._next_id] = held
        return self._next_id, held.slot

    def give_up(self, read_id: int) -> None:
        """Nobody waits for this read any more; its slot stays out of use until the read has ended."""
        if read_id not in self._reading:
            raise IntegrityError(f"read {read_id} is given up but not in progress")
        self._set_aside[read_id] = self._reading.pop(read_id)

    def read_ended(self, read_id: int, *, bytes_wanted: bool) -> int | None:
        """A read is over. Returns its slot, now being copied under the same id, or None when nobody wants the bytes."""
        held = self._set_aside.pop(read_id, None)
        if held is not None:
            self._free.append(held.slot)
            return None
        if read_id not in self._reading:
            raise IntegrityError(f"read {read_id} ended but was never started")
        slot = self._reading.pop(read_id).slot
        if not bytes_wanted:
            self._free.append(slot)
            return None
        self._copying[read_id] = slot
        return slot

    def copy_ended(self, read_id: int) -> None:
        """The bytes are out of the slot."""
        if read_id not in self._copying:
            raise IntegrityError(f"copy {read_id} ended but was never started")
        self._free.append(self._copying.pop(read_id))

    def check_integrity(self) -> None:
        """Every slot is in exactly one place. Raises IntegrityError."""
        held = [h.slot for h in (*self._reading.values(), *self._set_aside.values())]
        everything = sorted([*self._free, *held, *self._copying.values()])
        if everything != list(range(self.total)):
            raise IntegrityError(f"staging slots are lost or doubled: {everything}")
