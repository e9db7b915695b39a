"""The in-process transport among holders that come, change their bytes and go: every read ends exactly once."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from cluster.core.clock import ManualClock
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport
from tests.stateful import long, quick

BLOCK, BLOCKS, SLOTS = 8, 4, 3
HOLDERS = st.sampled_from(["p0", "p1"])


class Reading(RuleBasedStateMachine):
    """One reader; holders p0 and p1."""

    @initialize()
    def begin(self) -> None:
        self.network, self.clock = InProcessNetwork(), ManualClock()
        self.reader = InProcessTransport(self.network, "d", self.clock)
        self.staging = np.zeros((SLOTS, 2 * BLOCK), np.uint8)
        self.reader.register(np.zeros((1, BLOCK), np.uint8), self.staging)
        self.holders: dict[str, InProcessTransport] = {}
        self.pools: dict[str, NDArray[np.uint8]] = {}
        self.known: set[str] = set()
        self.adding: list[tuple[str, bool]] = []
        self.reads: dict[int, tuple[str, list[int], int] | None] = {}  # None: it must fail
        self.made = 0

    @rule(name=HOLDERS)
    def comes(self, name: str) -> None:
        if name not in self.holders:
            self.pools[name] = np.zeros((BLOCKS, BLOCK), np.uint8)
            self.holders[name] = InProcessTransport(self.network, name, self.clock)
            assert self.holders[name].register(self.pools[name], self.staging.copy()) == name.encode()

    @rule(name=HOLDERS)
    def goes(self, name: str) -> None:
        """Its memory is a new one when it comes back; what the reader knew of the old one is not that of the new."""
        if name in self.holders and name not in self.known:
            self.holders.pop(name).close()

    @rule(name=HOLDERS, metadata=st.sampled_from(["right", "right", "other"]), address=st.sampled_from([0, 0, 8]))
    def add(self, name: str, metadata: str, address: int) -> None:
        pool = self.pools.get(name)
        at = address + (int(pool.ctypes.data) if pool is not None else 0)
        good = name in self.holders and metadata == "right" and not address
        self.reader.add_peer(name, name.encode() if metadata == "right" else b"?", at)
        self.adding.append((name, good))
        if good:
            self.known.add(name)

    @rule(name=HOLDERS, twice=st.booleans())
    def drop(self, name: str, twice: bool) -> None:
        for _ in range(1 + twice):
            self.reader.drop_peer(name)
        self.known.discard(name)

    @rule(name=HOLDERS, block=st.integers(0, BLOCKS - 1), value=st.integers(0, 255))
    def write(self, name: str, block: int, value: int) -> None:
        if name in self.holders:
            self.pools[name][block] = value

    @rule(name=HOLDERS, blocks=st.lists(st.integers(-1, BLOCKS), min_size=1, max_size=3), slot=st.integers(-1, SLOTS))
    def read(self, name: str, blocks: list[int], slot: int) -> None:
        """Also of a peer that is not known, beyond its pool, into no slot, or more than a slot holds."""
        base = int(self.pools[name].ctypes.data) if name in self.pools else 0
        self.made += 1
        self.reader.read(self.made, name, [(base + block * BLOCK, BLOCK) for block in blocks], slot)
        right = name in self.known and all(0 <= b < BLOCKS for b in blocks) and 0 <= slot < SLOTS and len(blocks) < 3
        self.reads[self.made] = (name, blocks, slot) if right else None

    @rule()
    def poll(self) -> None:
        for ended in self.reader.poll():
            match ended:
                case PeerAdded() | PeerFailed():
                    name, good = self.adding.pop(0)
                    assert (ended.peer, isinstance(ended, PeerAdded)) == (name, good)
                case ReadFailed():
                    assert self.reads.pop(ended.id) is None, ended.reason
                case ReadDone():
                    wanted = self.reads.pop(ended.id)
                    assert wanted is not None, "a read that should have failed"

        assert not self.reads, "a read that never ends"
        assert not self.adding

    @precondition(lambda self: not self.reads)
    @rule(name=HOLDERS, block=st.integers(0, BLOCKS - 1), slot=st.integers(0, SLOTS - 1), value=st.integers(0, 255))
    def read_late(self, name: str, block: int, slot: int, value: int) -> None:
        """What a holder overwrites between read and poll is what arrives."""
        if name not in self.known:
            return
        self.read(name, [block], slot)
        self.pools[name][block] = value
        self.poll()
        assert (self.staging[slot, :BLOCK] == value).all()

    @invariant()
    def busy_while_it_owes(self) -> None:
        if hasattr(self, "reader"):
            assert self.reader.busy == bool(self.reads or self.adding)

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.poll()
            self.reader.close()
            assert not self.reader.busy
            assert self.network.pool("d") is None


TestReading = quick(Reading, examples=40, steps=25)
TestReadingLong = long(Reading, examples=500, steps=60)
