"""A transport between engines of one process: the sibling of NIXL for simulation, tests and one-process demos.

Same contract (engine/wire.py, tests/contract/test_transport.py). Memory is found by address: an `InProcessNetwork`
knows each agent's registered pool. Bytes are copied in `poll`, not in `read`, as late as a real one-sided read may copy
them: what the holder overwrites in between is what arrives.
"""

import math
import threading
from dataclasses import dataclass

import numpy as np

from cluster.core.clock import Clock
from cluster.core.errors import TransferError
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed
from engine.wire import Bytes, DeviceBytes, HostBytes
from kv_transfer.transports.ranges import check_read

WARM_BYTES = 1 << 20


class InProcessNetwork:
    """Agents by name, each with its registered pool. Shared by the transports of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the wire threads of several engines meet here
        self._pools: dict[str, HostBytes] = {}

    def join(self, agent: str, pool: HostBytes) -> None:
        """Make a pool readable. Raises TransferError when the name is taken."""
        with self._lock:
            if agent in self._pools:
                raise TransferError(f"agent {agent} is registered already")
            self._pools[agent] = pool.reshape(-1)

    def leave(self, agent: str) -> None:
        """Forget an agent. Unknown: no-op."""
        with self._lock:
            self._pools.pop(agent, None)

    def pool(self, agent: str) -> HostBytes | None:
        """An agent's pool as flat bytes; None when there is no such agent (any more)."""
        with self._lock:
            return self._pools.get(agent)


PROCESS = InProcessNetwork()
"""The network of all engines of this process; what needs networks apart (tests, simulation) makes its own."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A read in progress: what it copies to where."""

    read_id: int
    started: float
    sources: list[HostBytes]
    slot: int


@dataclass(frozen=True, slots=True)
class _Warming:
    """A peer being added: the part of its pool that warms the link."""

    peer: str
    source: HostBytes


class InProcessTransport:
    """A `Transport` (engine/wire.py) over an InProcessNetwork."""

    name = "inprocess"

    def __init__(self, network: InProcessNetwork, agent: str, clock: Clock) -> None:
        self._network = network
        self._agent = agent
        self._clock = clock
        self._peers: set[str] = set()
        self._pending: list[_Reading | _Warming | ReadFailed | PeerFailed] = []
        self._staging: HostBytes = np.empty((0, 0), np.uint8)

    def register(self, pool: Bytes, staging: Bytes) -> bytes:
        """See Transport. The metadata is the agent's name. Raises TransferError for a taken name or a GPU."""
        if isinstance(pool, DeviceBytes) or isinstance(staging, DeviceBytes):
            raise TransferError("transport.kind is inprocess, which moves host memory only; on a GPU it must be nixl")
        self._staging = staging
        self._network.join(self._agent, pool)
        return self._agent.encode()

    def add_peer(self, peer: str, metadata: bytes, pool_address: int) -> None:
        """See Transport."""
        pool = self._network.pool(peer)
        if metadata != peer.encode():
            self._pending.append(PeerFailed(peer, f"the metadata are not those of {peer}"))
        elif pool is None:
            self._pending.append(PeerFailed(peer, f"peer {peer} cannot be reached"))
        elif pool_address != int(pool.ctypes.data):
            self._pending.append(PeerFailed(peer, f"the pool of {peer} does not begin at {pool_address:#x}"))
        else:
            self._peers.add(peer)
            self._pending.append(_Warming(peer, pool[:WARM_BYTES]))

    def drop_peer(self, peer: str) -> None:
        """See Transport."""
        self._peers.discard(peer)

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        """See Transport."""
        try:
            sources = self._locate(peer, ranges, slot)
        except TransferError as error:
            self._pending.append(ReadFailed(read_id, str(error)))
        else:
            self._pending.append(_Reading(read_id, self._clock.now(), sources, slot))

    def serve(self, on: bool) -> None:
        """See Transport. Nothing to do: readers copy for themselves."""

    def poll(self) -> list[ReadDone | ReadFailed | PeerAdded | PeerFailed]:
        """See Transport."""
        pending, self._pending = self._pending, []
        return [self._finish(one) for one in pending]

    @property
    def busy(self) -> bool:
        """See Transport."""
        return bool(self._pending)

    def close(self) -> None:
        """See Transport."""
        self._network.leave(self._agent)
        self._pending.clear()

    def _locate(self, peer: str, ranges: list[tuple[int, int]], slot: int) -> list[HostBytes]:
        pool = self._network.pool(peer) if peer in self._peers else None
        if pool is None:
            raise TransferError(f"peer {peer} is unknown or gone")
        base = int(pool.ctypes.data)
        check_read(ranges, base, pool.nbytes, self._staging, slot)
        return [pool[address - base : address - base + size] for address, size in ranges]

    def _finish(
        self, pending: _Reading | _Warming | ReadFailed | PeerFailed
    ) -> ReadDone | ReadFailed | PeerAdded | PeerFailed:
        match pending:
            case _Warming():
                started = self._clock.now()
                pending.source.copy()
                seconds = self._clock.now() - started
                # On a virtual clock the copy takes no time at all.
                speed = pending.source.nbytes / seconds / 1e9 if seconds > 0 else math.inf
                return PeerAdded(pending.peer, needs_polling=False, gb_per_s=speed)
            case _Reading():
                place = 0
                for source in pending.sources:
                    self._staging[pending.slot, place : place + source.nbytes] = source
                    place += source.nbytes
                return ReadDone(pending.read_id, self._clock.now() - pending.started)
            case _:
                return pending
