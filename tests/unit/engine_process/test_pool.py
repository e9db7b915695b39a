"""Engine memory: aligned, poisoned, copied in whole blocks, and never at an index that names something else."""

import numpy as np
import pytest

from cluster.core.digest import digest_block
from cluster.core.errors import ConfigError, IntegrityError
from engine.layout import KVLayout
from engine.pool import HostMemory

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SIZE = LAYOUT.block_bytes


def memory(blocks: int = 6, slots: int = 2, slot_blocks: int = 3) -> HostMemory:
    return HostMemory(LAYOUT, blocks, slots, slot_blocks * SIZE + 8)


def test_shapes_and_alignment() -> None:
    mem = memory()
    assert mem.pool.shape == (6, SIZE)
    assert mem.staging.shape == (2, 3 * SIZE + 8)
    assert mem.pool_address == mem.pool.ctypes.data
    assert mem.pool.ctypes.data % 4096 == mem.staging.ctypes.data % 4096 == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_poison_is_nan(dtype: type[np.floating]) -> None:
    mem = memory()
    mem.poison([1, 4])
    nan_blocks = np.flatnonzero(np.isnan(mem.pool.view(dtype)).all(axis=1))
    assert nan_blocks.tolist() == [1, 4]
    assert (mem.pool[[0, 2, 3, 5]] == 0).all()
    mem.poison_all()
    assert np.isnan(mem.pool.view(dtype)).all()
    assert (mem.staging == 0xFF).all()


def test_copy_in_takes_whole_blocks_from_the_start_of_the_slot() -> None:
    mem = memory()
    mem.staging[1] = np.arange(mem.staging.shape[1], dtype=np.uint64).astype(np.uint8)
    mem.copy_in(1, [5, 0])
    assert (mem.pool[5] == mem.staging[1, :SIZE]).all()
    assert (mem.pool[0] == mem.staging[1, SIZE : 2 * SIZE]).all()
    assert (mem.pool[[1, 2, 3, 4]] == 0).all()
    digests = mem.digests([0, 5])
    mem.staging.fill(0)  # the digest was of the copy
    assert digests == [digest_block(mem.pool[0], 2), digest_block(mem.pool[5], 2)] == mem.digests([0, 5])


def test_what_is_converted_is_digested_as_it_came_and_as_it_is_kept() -> None:
    mem = HostMemory(LAYOUT, 6, 2, 3 * SIZE, lambda copies, source, _: np.repeat(copies, 2, axis=1))
    half = SIZE // 2  # of a block of float16
    mem.staging[1] = np.arange(3 * SIZE, dtype=np.uint64).astype(np.uint8)
    came = [mem.staging[1, place * half : (place + 1) * half].copy() for place in range(2)]
    digests, converted = mem.take_converted(1, [5, 0], "float16")
    assert digests == [digest_block(each, 2) for each in came]
    for block, each in zip((5, 0), came, strict=True):
        np.testing.assert_array_equal(mem.pool[block], np.repeat(each, 2))
    assert converted == mem.digests([5, 0])
    with pytest.raises(IntegrityError, match="cannot hold"):
        mem.take_converted(1, [0, 1, 2, 3, 4, 5, 0], "float16")
    with pytest.raises(IntegrityError, match="cannot become float32"):
        memory().take_converted(0, [0], "float16")


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_that_do_not_exist_are_refused(block: int) -> None:
    mem = memory()
    for call in (lambda: mem.poison([block]), lambda: mem.digests([block]), lambda: mem.copy_in(0, [block])):
        with pytest.raises(IntegrityError, match="does not exist"):
            call()


@pytest.mark.parametrize(("slot", "blocks"), [(-1, [0]), (2, [0]), (0, [0, 1, 2, 3])])
def test_slots_that_do_not_fit_are_refused(slot: int, blocks: list[int]) -> None:
    with pytest.raises(IntegrityError, match="cannot hold"):
        memory().copy_in(slot, blocks)


@pytest.mark.parametrize(("blocks", "slots", "slot_bytes"), [(0, 1, SIZE), (1, 0, SIZE), (1, 1, SIZE - 1)])
def test_impossible_sizes_are_the_operators_fault(blocks: int, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        HostMemory(LAYOUT, blocks, slots, slot_bytes)
