"""Random rows over a pool of NaN: what kernels and their torch references are both given."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from engine.layout import KVLayout
from engine.model.attention import PagedKV
from engine.model.base import ForwardRow
from engine.model.dtypes import TORCH_DTYPES

TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 3e-2}  # the interpreter cuts bfloat16 instead of rounding it
POISON = 0xFF


@dataclass(frozen=True)
class Shape:
    """A layout of two layers, query heads per kv head, and rows as (start, tokens)."""

    dtype: str
    head_dim: int
    kv_heads: int
    group: int
    block_size: int
    rows: tuple[tuple[int, int], ...]
    window: int | None
    seed: int

    @property
    def layout(self) -> KVLayout:
        return KVLayout(2, self.kv_heads, self.head_dim, self.block_size, self.dtype)


def shapes(*, longest: int) -> st.SearchStrategy[Shape]:
    """Every dtype and head size, odd sizes of everything else."""
    row = st.tuples(st.integers(0, longest), st.one_of(st.just(1), st.integers(1, longest // 2)))
    return st.builds(
        Shape,
        dtype=st.sampled_from(sorted(TOLERANCE)),
        head_dim=st.sampled_from([64, 80, 96, 128, 256]),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 4, 7]),
        block_size=st.sampled_from([1, 3, 8, 16, 32]),
        rows=st.lists(row, min_size=1, max_size=3).map(tuple),
        window=st.one_of(st.none(), st.integers(1, longest)),
        seed=st.integers(0, 1000),
    )


def fill(shape: Shape) -> tuple[PagedKV, list[ForwardRow], torch.Tensor]:
    """A poisoned pool with K and V of every row's positions, its rows, and queries [T, A, D]."""
    layout, torch_dtype = shape.layout, TORCH_DTYPES[shape.dtype]
    generator = torch.Generator().manual_seed(shape.seed)
    pages = [-(-(start + count) // layout.block_size) for start, count in shape.rows]
    blocks = list(range(sum(pages) + 3))
    random.Random(shape.seed).shuffle(blocks)
    pool = np.full((len(blocks), layout.block_bytes), POISON, dtype=np.uint8)
    kv = PagedKV(pool, layout)
    view = kv.elements.view(layout.shape(len(blocks)))
    rows = []
    for (start, count), used in zip(shape.rows, pages, strict=True):
        table = [blocks.pop() for _ in range(used)]
        rows.append(ForwardRow([0] * count, start, table, write=True, logits=True))
        for position in range(start + count):
            place = view[table[position // layout.block_size], :, :, :, position % layout.block_size]
            place.copy_(torch.randn(place.shape, generator=generator))
    tokens = sum(count for _, count in shape.rows)
    queries = torch.randn((tokens, shape.kv_heads * shape.group, shape.head_dim), generator=generator).to(torch_dtype)
    return kv, rows, queries


def close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Within what the dtype can tell."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
