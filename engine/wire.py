"""The border between an engine and whatever moves bytes between engines (implemented in kv_transfer/transports).

One thread, the wire thread, makes every call. Reads are one-sided: the holder's process does nothing.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import ReadDone, ReadFailed


class Transport(Protocol):
    """Reads remote memory into local staging slots. Not thread-safe: used by one thread only."""

    name: str

    def register(self, pool: NDArray[np.uint8], staging: NDArray[np.uint8], slot_bytes: int) -> bytes:
        """Make the pool readable by peers and the staging usable as a target. Returns the agent metadata bytes."""

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Make a peer readable. Raises TransferError."""

    def drop_peer(self, peer: str) -> None:
        """Forget a peer. Reads in progress stay in progress: they end by themselves or never. Unknown: no-op."""

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        """Start a read of (address, bytes) ranges, back to back, into a slot. Never raises: failures come from `poll`."""

    def poll(self) -> list[ReadDone | ReadFailed]:
        """Reads that have ended since the last call."""

    @property
    def busy(self) -> bool:
        """Whether reads are in progress, so that `poll` must be called soon."""

    @property
    def serving(self) -> bool:
        """Whether peers may be reading from here over a path that needs this side to poll (TCP)."""

    def close(self) -> None:
        """Leave; nothing is called afterwards."""
