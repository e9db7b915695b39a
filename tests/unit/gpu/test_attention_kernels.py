"""Decode and prefill attention in Triton's interpreter, against the torch reference over the same poisoned pool."""

import mmap

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from engine.gpu.kernels.attention import PoolView, TileShape, decode_attention, prefill_attention, tile_shape
from engine.gpu.operators import plan
from engine.layout import KVLayout
from engine.model.attention import PagedKV, attend, plan_step
from engine.model.base import ForwardRow
from tests.unit.gpu.pools import Shape, close, fill, shapes

SMALL = TileShape(queries=16, positions=16, span=16, spans=3)  # spans of 32 from 49 positions on
CPU = torch.device("cpu")
LAYER = 1


def attended(kv: PagedKV, rows: list[ForwardRow], q_TAD: torch.Tensor, window: int | None) -> torch.Tensor:
    """What the kernels find."""
    step = plan(rows, kv.layout.block_size, SMALL, CPU)
    pool, out_TAD = PoolView(kv.elements, kv.layout), torch.full_like(q_TAD, float("nan"))
    if len(step.decodes):
        decode_attention(
            out_TAD, q_TAD, pool, LAYER, step.rows, step.decodes, longest=step.longest, window=window, tile=SMALL
        )
    if len(step.tiles[0]):
        prefill_attention(out_TAD, q_TAD, pool, LAYER, step.rows, step.tiles, window=window, tile=SMALL)
    return out_TAD


def check(shape: Shape) -> None:
    kv, rows, q_TAD = fill(shape)
    expected = attend(kv, LAYER, q_TAD, plan_step(rows, kv, q_TAD.shape[1], shape.window))
    close(attended(kv, rows, q_TAD, shape.window), expected, shape.dtype)


@settings(max_examples=6)
@given(shape=shapes(longest=40))
@example(Shape("float32", 80, 2, 3, 5, ((48, 1), (47, 1)), None, 0))  # the longer row is read in fewer spans
@example(Shape("bfloat16", 96, 1, 2, 16, ((0, 1), (17, 18), (63, 1)), 9, 1))
def test_attention_is_the_reference(shape: Shape) -> None:
    check(shape)


@pytest.mark.verify
@settings(max_examples=150, derandomize=False)
@given(shape=shapes(longest=130))
def test_attention_is_the_reference_over_many_shapes(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_beyond_two_to_the_thirty_one_elements(dtype: str) -> None:
    """A pool larger than memory: only the pages that are touched exist."""
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    blocks = 2**31 // (layout.block_bytes // layout.item_bytes) + 40
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, blocks * layout.block_bytes, flags=flags)
    kv = PagedKV(np.frombuffer(memory, np.uint8).reshape(blocks, -1), layout)
    table = [blocks - 1, 3, blocks - 2]
    view = kv.elements.view(layout.shape(blocks))
    view[table] = torch.randn(layout.shape(3), generator=torch.Generator().manual_seed(0)).to(view.dtype)
    rows = [ForwardRow([0] * count, start, table, write=True, logits=True) for count, start in ((1, 40), (7, 30))]
    q_TAD = torch.randn((8, 4, 64), generator=torch.Generator().manual_seed(1)).to(view.dtype)
    expected = attend(kv, LAYER, q_TAD, plan_step(rows, kv, 4, None))
    close(attended(kv, rows, q_TAD, None), expected, dtype)


def test_a_row_is_the_same_alone_and_in_company() -> None:
    shape = Shape("float32", 64, 2, 2, 16, ((70, 1), (20, 9), (5, 1)), None, 3)
    kv, rows, q_TAD = fill(shape)
    together = attended(kv, rows, q_TAD, None)
    first = 0
    for row in rows:
        own = slice(first, first + len(row.tokens))
        first = own.stop
        assert torch.equal(attended(kv, [row], q_TAD[own].contiguous(), None), together[own])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_tiles_fit_a_gpu(head_dim: int, dtype: str) -> None:
    """Two stages of K and V and one tile of queries within 100 kB of shared memory."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype)
    tile, width = tile_shape(layout), 1 << (head_dim - 1).bit_length()
    assert (4 * tile.positions + tile.queries) * width * layout.item_bytes <= 100 << 10
    assert min(tile.positions, tile.queries) >= 16
