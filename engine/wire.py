"""The border between an engine and whatever moves bytes between engines (implemented in kv_transfer/transports).

One thread, the wire thread, makes every call. Reads are one-sided: the holder's process does nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed

HostBytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Memory of a GPU, uint8 [rows, row_bytes], contiguous: a place and no access. Whoever made it keeps it alive.

    `device`: CUDA's number of the GPU. `spare`: bytes behind the last row that are the transport's own.
    """

    address: int
    shape: tuple[int, int]
    device: int
    spare: int = 0

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1]


Bytes = HostBytes | DeviceBytes


def address_of(memory: Bytes, row: int = 0) -> int:
    """Where a row begins."""
    start = memory.address if isinstance(memory, DeviceBytes) else int(memory.ctypes.data)
    return start + row * int(memory.shape[1])


class Transport(Protocol):
    """Reads remote memory into local staging slots. Not thread-safe: used by one thread only."""

    name: str

    def register(self, pool: Bytes, staging: Bytes) -> bytes:
        """Make the pool [num_blocks, block_bytes] readable by peers and staging [slots, slot_bytes] usable as a target.

        Returns the agent metadata bytes, which a peer needs for `add_peer`. Raises TransferError.
        """

    def add_peer(self, peer: str, metadata: bytes, pool_address: int) -> None:
        """Make a peer readable and warm the link. Never raises: `poll` reports PeerAdded or PeerFailed."""

    def drop_peer(self, peer: str) -> None:
        """Forget a peer. Reads in progress stay in progress: they end by themselves or never. Unknown: no-op."""

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        """Start a read of (address, bytes) ranges, back to back, into a slot. Never raises: `poll` reports failures."""

    def serve(self, on: bool) -> None:
        """Whether peers need this side to poll (link set-up, TCP)."""

    def poll(self) -> list[ReadDone | ReadFailed | PeerAdded | PeerFailed]:
        """What has ended since the last call; also gives the library its turn for peers that read from here."""

    @property
    def busy(self) -> bool:
        """Whether `poll` must be called soon: reads or warm-ups are in progress, or peers need this side to poll."""

    def close(self) -> None:
        """Leave; nothing is called afterwards."""
