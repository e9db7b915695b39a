"""The memory of an engine whose model is on a GPU: block pool and staging there, digests by kernel.

Every call returns only when the GPU has done it, and so does every step (engine/model/operators.py). What is reported
to the server has therefore happened: a block is offered after the last write into it, a copy is over before a batch
reads it. A copy on a stream of its own, beside the steps, is left to be measured on a GPU.

Transports read this memory from other processes, so it must be plain cudaMalloc: torch takes large tensors from there,
unless it was told to use expandable segments, which cannot be shared.
"""

from collections.abc import Iterable, Sequence

import torch

from cluster.core.errors import ConfigError, IntegrityError
from engine.gpu.kernels.digest import copy_blocks, digest_blocks
from engine.layout import KVLayout
from engine.model.operators import wait_for
from engine.pool import POISON, check_sizes
from engine.wire import DeviceBytes

SPARE_BYTES = 1 << 20  # behind the slots: where a transport reads to while it warms a link
_ALIGNED = 256


class DeviceMemory:
    """Block pool [num_blocks, block_bytes] and staging [slots, slot_bytes], uint8, on `device`; see `pool.Memory`."""

    def __init__(self, layout: KVLayout, num_blocks: int, slots: int, slot_bytes: int, device: torch.device) -> None:
        """Raises ConfigError for impossible sizes, or for memory that could not be shared with other processes."""
        check_sizes(layout, num_blocks, slots, slot_bytes)
        self.layout = layout
        self._device = device
        slot_bytes = -(-slot_bytes // _ALIGNED) * _ALIGNED
        self.blocks = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
        self._received = torch.zeros(slots * slot_bytes + SPARE_BYTES, dtype=torch.uint8, device=device)
        self._slots = self._received[: slots * slot_bytes].view(slots, slot_bytes)
        if device.type == "cuda":
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            check_segments(segments, [self.blocks.data_ptr(), self._received.data_ptr()])
            wait_for(device)

    @property
    def pool(self) -> DeviceBytes:
        return DeviceBytes(self.blocks.data_ptr(), (len(self.blocks), self.layout.block_bytes), self._device.index or 0)

    @property
    def staging(self) -> DeviceBytes:
        slots, slot_bytes = self._slots.shape
        return DeviceBytes(self._slots.data_ptr(), (slots, slot_bytes), self._device.index or 0, SPARE_BYTES)

    @property
    def pool_address(self) -> int:
        """Where block 0 begins, on the GPU."""
        return self.blocks.data_ptr()

    def poison_all(self) -> None:
        """Fill pool and staging with NaN bytes."""
        self.blocks.fill_(POISON)
        self._received.fill_(POISON)
        wait_for(self._device)

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN bytes. Raises IntegrityError for a block that does not exist."""
        which = list(blocks)
        self.blocks.index_fill_(0, self._index(which), POISON)
        wait_for(self._device)

    def take(self, slot: int, blocks: list[int]) -> list[bytes]:
        """Copy whole blocks, back to back from the start of a slot, into the pool; the digests of the copies.

        Raises IntegrityError for a slot or block that does not exist, or more blocks than the slot holds.
        """
        size, (slots, slot_bytes) = self.layout.block_bytes, self._slots.shape
        if not 0 <= slot < slots or len(blocks) * size > slot_bytes:
            raise IntegrityError(f"slot {slot} of {slots} cannot hold {len(blocks)} blocks of {size} bytes")
        if not blocks:
            return []
        received = self._slots[slot, : len(blocks) * size].view(-1, size)
        sources = torch.arange(len(blocks), device=self._device)
        return _digests(copy_blocks(self.blocks, self._index(blocks), received, sources, self.layout.kv_heads))

    def take_converted(self, slot: int, blocks: list[int], source: str) -> tuple[list[bytes], list[bytes]]:
        """Raises IntegrityError: only CPUs convert (engine/model/loader.py refuses the setting)."""
        raise IntegrityError(f"{source} cannot become {self.layout.dtype} on {self._device}")

    def digests(self, blocks: Iterable[int]) -> list[bytes]:
        """The digest of each block as it is now. Raises IntegrityError for a block that does not exist."""
        which = list(blocks)
        return _digests(digest_blocks(self.blocks, self._index(which), self.layout.kv_heads)) if which else []

    def _index(self, blocks: list[int]) -> torch.Tensor:
        for block in blocks:
            if not 0 <= block < len(self.blocks):
                raise IntegrityError(f"block {block} of {len(self.blocks)} does not exist")
        return torch.tensor(blocks, dtype=torch.int64).to(self._device)


def check_segments(segments: Sequence[dict[str, object]], addresses: Sequence[int]) -> None:
    """Raise ConfigError when an address lies in a segment (torch.cuda.memory_snapshot) that cannot be shared."""
    for segment in segments:
        start, size = segment["address"], segment["total_size"]
        if not isinstance(start, int) or not isinstance(size, int):
            raise ConfigError(f"torch speaks of its memory in other words: {segment}")
        if segment.get("is_expandable") and any(start <= address < start + size for address in addresses):
            raise ConfigError(
                "torch's expandable_segments are on (PYTORCH_CUDA_ALLOC_CONF): that memory cannot be read by peers"
            )


def _digests(sums: torch.Tensor) -> list[bytes]:
    """Rows of int64 as bytes; waits for the GPU."""
    return [row.tobytes() for row in sums.cpu().numpy().astype("<i8")]
