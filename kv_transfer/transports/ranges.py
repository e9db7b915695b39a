"""What every transport checks of a read before it starts one."""

from cluster.core.errors import TransferError
from engine.wire import Bytes


def check_read(ranges: list[tuple[int, int]], pool_start: int, pool_bytes: int, staging: Bytes, slot: int) -> None:
    """Raise TransferError unless the (address, bytes) ranges lie in the peer's pool and fit slot `slot`."""
    if not 0 <= slot < len(staging):
        raise TransferError(f"slot {slot} of {len(staging)} does not exist")
    total = sum(size for _, size in ranges)
    if not ranges or total > staging.shape[1]:
        raise TransferError(f"{len(ranges)} ranges of {total} bytes do not fit a slot of {staging.shape[1]}")
    for address, size in ranges:
        if size < 1 or address < pool_start or address + size > pool_start + pool_bytes:
            raise TransferError(f"{size} bytes at {address:#x} are not in the pool of the peer")
