"""A transport between engines of one process: the sibling of NIXL for simulation, tests and one-process demos.

Same contract (engine/wire.py, tests/contract/test_transport.py). Memory is found by address: an `InProcessNetwork`
knows each agent's registered pool. Bytes are copied in `poll`, not in `read`, as late as a real one-sided read may copy them:
what the holder overwrites in between is what arrives.
"""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.core.clock import Clock
from cluster.core.errors import TransferError
from engine.messages import ReadDone, ReadFailed

Bytes = NDArray[np.uint8]


class InProcessNetwork:
    """Agents by name, each with its registered pool. Shared by the transports of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the wire threads of several engines meet here
        self._pools: dict[str, Bytes] = {}

    def join(self, agent: str, pool: Bytes) -> None:
        """Make a pool readable. Raises TransferError when the name is taken."""
        with self._lock:
            if agent in self._pools:
                raise TransferError(f"agent {agent} is registered already")
            self._pools[agent] = pool.reshape(-1)

    def leave(self, agent: str) -> None:
        """Forget an agent. Unknown: no-op."""
        with self._lock:
            self._pools.pop(agent, None)

    def pool(self, agent: str) -> Bytes | None:
        """An agent's pool as flat bytes; None when there is no such agent (any more)."""
        with self._lock:
            return self._pools.get(agent)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A read that was started: what it copies, or why it cannot."""

    read_id: int
    started: float
    sources: list[Bytes]
    slot: int
    failure: str | None


class InProcessTransport:
    """A `Transport` (engine/wire.py) over an InProcessNetwork."""

    name = "inprocess"

    def __init__(self, network: InProcessNetwork, agent: str, clock: Clock) -> None:
        self._network = network
        self._agent = agent
        self._clock = clock
        self._peers: set[str] = set()
        self._pending: list[_Pending] = []
        self._staging: Bytes = np.empty((0, 0), np.uint8)

    def register(self, pool: Bytes, staging: Bytes, slot_bytes: int) -> bytes:
        """See Transport. `staging` is [slots, slot_bytes]. The metadata is the agent's name."""
        self._staging = staging.reshape(-1, slot_bytes)
        self._network.join(self._agent, pool)
        return self._agent.encode()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """See Transport."""
        if metadata != peer.encode():
            raise TransferError(f"the metadata are not those of {peer}")
        if self._network.pool(peer) is None:
            raise TransferError(f"peer {peer} cannot be reached")
        self._peers.add(peer)

    def drop_peer(self, peer: str) -> None:
        """See Transport."""
        self._peers.discard(peer)

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        """See Transport."""
        sources: list[Bytes] = []
        failure: str | None = None
        try:
            sources = self._locate(peer, ranges, slot)
        except TransferError as error:
            failure = str(error)
        self._pending.append(_Pending(read_id, self._clock.now(), sources, slot, failure))

    def poll(self) -> list[ReadDone | ReadFailed]:
        """See Transport."""
        pending, self._pending = self._pending, []
        return [self._finish(read) for read in pending]

    @property
    def busy(self) -> bool:
        """See Transport."""
        return bool(self._pending)

    @property
    def serving(self) -> bool:
        """See Transport: readers copy for themselves."""
        return False

    def close(self) -> None:
        """See Transport."""
        self._network.leave(self._agent)
        self._pending.clear()

    def _locate(self, peer: str, ranges: list[tuple[int, int]], slot: int) -> list[Bytes]:
        pool = self._network.pool(peer) if peer in self._peers else None
        if pool is None:
            raise TransferError(f"peer {peer} is unknown or gone")
        if not 0 <= slot < len(self._staging):
            raise TransferError(f"slot {slot} of {len(self._staging)} does not exist")
        total = sum(size for _, size in ranges)
        if total > self._staging.shape[1]:
            raise TransferError(f"{total} bytes do not fit a slot of {self._staging.shape[1]}")
        base = int(pool.ctypes.data)
        for address, size in ranges:
            if size < 1 or address < base or address + size > base + pool.nbytes:
                raise TransferError(f"{size} bytes at {address:#x} are not in the pool of {peer}")
        return [pool[address - base : address - base + size] for address, size in ranges]

    def _finish(self, read: _Pending) -> ReadDone | ReadFailed:
        if read.failure is not None:
            return ReadFailed(read.read_id, read.failure)
        place = 0
        for source in read.sources:
            self._staging[read.slot, place : place + source.nbytes] = source
            place += source.nbytes
        return ReadDone(read.read_id, self._clock.now() - read.started)
