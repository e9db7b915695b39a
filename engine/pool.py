"""The memory an engine owns: block pool and staging slots, touched before it is registered (DESIGN §2, §7).

Anonymous private mappings: page-aligned, so that a transport can register them, and readable by another process over
CMA. Every page is written once at start; a first touch during a read or a step would cost a fault per page there.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.core.digest import digest_block
from cluster.core.errors import ConfigError, IntegrityError
from engine.layout import KVLayout
from engine.messages import Copy
from engine.pages import allocate
from engine.wire import Bytes

POISON = 0xFF  # all ones is NaN in float32, bfloat16 and float16, and in the scales of int8; it is -1 in int64

Convert = Callable[[NDArray[np.uint8], str, KVLayout], NDArray[np.uint8]]
"""Blocks [n, bytes] of another KV dtype -> [n, block_bytes] of the layout (engine/model/kv_codec.py)."""


class Memory(Protocol):
    """What an engine asks of its memory, wherever it is: HostMemory, or engine/gpu/memory.py."""

    layout: KVLayout

    @property
    def pool(self) -> Bytes: ...

    @property
    def staging(self) -> Bytes: ...

    @property
    def pool_address(self) -> int: ...

    def poison_all(self) -> None: ...

    def poison(self, blocks: Iterable[int]) -> None: ...

    def take(self, slot: int, blocks: list[int]) -> list[bytes]: ...

    def take_converted(self, slot: int, blocks: list[int], source: str) -> tuple[list[bytes], list[bytes]]: ...

    def digests(self, blocks: Iterable[int]) -> list[bytes]: ...


def run_copy(memory: Memory, copy: Copy) -> tuple[list[bytes], list[bytes] | None]:
    """Carry out a Copy: the digests of a CopyDone. Raises IntegrityError for a slot or block that does not exist."""
    if copy.source:
        return memory.take_converted(copy.slot, copy.blocks, copy.source)
    return memory.take(copy.slot, copy.blocks), None


def check_sizes(layout: KVLayout, num_blocks: int, slots: int, slot_bytes: int) -> None:
    """Raises ConfigError for memory that no engine could work with."""
    if num_blocks < 1 or slots < 1:
        raise ConfigError(f"{num_blocks} blocks and {slots} staging slots: at least one of each is needed")
    if slot_bytes < layout.block_bytes:
        raise ConfigError(
            f"handoff.slot_bytes: {slot_bytes} does not hold a block of this model, {layout.block_bytes} bytes"
        )


class HostMemory:
    """Block pool `pool` [num_blocks, block_bytes] and staging `staging` [slots, slot_bytes], both uint8."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, slots: int, slot_bytes: int, convert: Convert | None = None
    ) -> None:
        check_sizes(layout, num_blocks, slots, slot_bytes)
        self.layout = layout
        self._convert = convert
        self.pool = _allocate(num_blocks, layout.block_bytes)
        self.staging = _allocate(slots, slot_bytes)

    @property
    def pool_address(self) -> int:
        """Where block 0 begins, in this process."""
        return int(self.pool.ctypes.data)

    def poison_all(self) -> None:
        """Fill pool and staging with NaN bytes: what was never written is then never mistaken for KV."""
        self.pool.fill(POISON)
        self.staging.fill(POISON)

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN bytes. Raises IntegrityError for a block that does not exist."""
        for block in blocks:
            self._block(block).fill(POISON)

    def copy_in(self, slot: int, blocks: list[int]) -> None:
        """Copy whole blocks, back to back from the start of a slot, into the pool.

        Raises IntegrityError for a slot or block that does not exist, or more blocks than the slot holds.
        """
        for block, received in zip(blocks, self._received(slot, len(blocks), self.layout.block_bytes), strict=True):
            self._block(block)[:] = received

    def take(self, slot: int, blocks: list[int]) -> list[bytes]:
        """`copy_in`, then the digests of the copies: the staging slot may still change (DESIGN §4.8)."""
        self.copy_in(slot, blocks)
        return self.digests(blocks)

    def take_converted(self, slot: int, blocks: list[int], source: str) -> tuple[list[bytes], list[bytes]]:
        """`take` of blocks whose KV is in dtype `source`: the digests of the copies, and of what they became here.

        The copies are private memory that only this call sees. Raises IntegrityError as `copy_in`, or when this memory
        cannot convert.
        """
        if self._convert is None:
            raise IntegrityError(f"{source} cannot become {self.layout.dtype} here")
        theirs = dataclasses.replace(self.layout, dtype=source)
        copies = self._received(slot, len(blocks), theirs.block_bytes).copy()
        digests = [digest_block(copy, theirs.kv_heads) for copy in copies]
        for block, converted in zip(blocks, self._convert(copies, source, self.layout), strict=True):
            self._block(block)[:] = converted
        return digests, self.digests(blocks)

    def digests(self, blocks: Iterable[int]) -> list[bytes]:
        """The digest of each block as it is now. Raises IntegrityError for a block that does not exist."""
        return [digest_block(self._block(block), self.layout.kv_heads) for block in blocks]

    def _received(self, slot: int, blocks: int, size: int) -> NDArray[np.uint8]:
        """What is in a slot, as [blocks, size]."""
        if not 0 <= slot < len(self.staging) or blocks * size > self.staging.shape[1]:
            raise IntegrityError(f"slot {slot} of {len(self.staging)} cannot hold {blocks} blocks of {size} bytes")
        return self.staging[slot, : blocks * size].reshape(blocks, size)

    def _block(self, block: int) -> NDArray[np.uint8]:
        if not 0 <= block < len(self.pool):  # a negative index would name another block without a word
            raise IntegrityError(f"block {block} of {len(self.pool)} does not exist")
        row: NDArray[np.uint8] = self.pool[block]
        return row


def _allocate(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    array = allocate(rows * row_bytes).reshape(rows, row_bytes)
    array.fill(0)
    return array
