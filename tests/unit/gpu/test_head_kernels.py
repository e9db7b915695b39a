"""Norm, rotation and the write into the pool in Triton's interpreter, against plain torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu.kernels.attention import PoolView
from engine.gpu.kernels.heads import add_norm, rotate_and_write
from engine.model.attention import PagedKV, plan_step, write_kv
from engine.model.base import ForwardRow
from engine.model.config import RopeConfig
from engine.model.dtypes import TORCH_DTYPES
from engine.model.rope import Rope, rotate
from tests.unit.gpu.pools import POISON, TOLERANCE, Shape, close, shapes

EPS = 1e-5


@settings(max_examples=5)
@given(
    tokens=st.integers(1, 4),
    width=st.sampled_from([1, 33, 64, 576, 4096]),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    adds=st.booleans(),
)
def test_the_stream_is_summed_in_float32_and_normed(tokens: int, width: int, dtype: str, *, adds: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    x_TE = torch.randn((tokens, width), generator=generator)
    delta_TE = torch.randn((tokens, width), generator=generator).to(TORCH_DTYPES[dtype]) if adds else None
    weight_E = torch.randn(width, generator=generator).to(TORCH_DTYPES[dtype])
    expected = x_TE if delta_TE is None else x_TE + delta_TE
    found = add_norm(x_TE, delta_TE, weight_E, EPS)
    torch.testing.assert_close(x_TE, expected, rtol=0, atol=0)
    close(found, F.rms_norm(expected, (width,), None, EPS).to(weight_E.dtype) * weight_E, dtype)


def check_heads(shape: Shape, *, norms: bool) -> None:
    """Queries, and the whole pool, of which all but the written vectors is poison."""
    layout, dtype = shape.layout, TORCH_DTYPES[shape.dtype]
    generator = torch.Generator().manual_seed(shape.seed)
    heads, kv_heads, tokens = shape.kv_heads * shape.group, shape.kv_heads, sum(count for _, count in shape.rows)
    qkv_TND = torch.randn((tokens, heads + 2 * kv_heads, shape.head_dim), generator=generator).to(dtype)
    weight = torch.randn((heads + kv_heads, shape.head_dim), generator=generator).to(dtype) if norms else None
    pages = [-(-(start + count) // layout.block_size) for start, count in shape.rows]
    blocks = list(np.random.default_rng(shape.seed).permutation(sum(pages)))
    rows = [
        ForwardRow([0] * count, start, [int(blocks.pop()) for _ in range(used)], write=index != 1, logits=True)
        for index, ((start, count), used) in enumerate(zip(shape.rows, pages, strict=True))
    ]
    found_pool, expected_pool = (np.full((sum(pages), layout.block_bytes), POISON, np.uint8) for _ in range(2))
    kv = PagedKV(expected_pool, layout)
    step = plan_step(rows, kv, heads, None)
    angles = Rope(RopeConfig("default", 10_000.0), shape.head_dim).angles(step.positions)

    qk = qkv_TND[:, :-kv_heads]
    if weight is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, EPS) * weight
    rotated = rotate(qk, angles)
    write_kv(kv, 1, torch.stack((rotated[:, heads:], qkv_TND[:, -kv_heads:]), dim=1), step)

    places = [
        row.table[p // layout.block_size] * layout.block_size + p % layout.block_size if row.write else -1
        for row in rows
        for p in range(row.start, row.start + len(row.tokens))
    ]
    elements = PagedKV(found_pool, layout).elements
    q_TAD = rotate_and_write(qkv_TND, weight, EPS, angles, PoolView(elements, layout), 1, torch.tensor(places))
    close(q_TAD, rotated[:, :heads], shape.dtype)
    assert torch.equal(elements.isnan(), kv.elements.isnan())
    close(elements.nan_to_num(), kv.elements.nan_to_num(), shape.dtype)


@settings(max_examples=4)
@given(shape=shapes(longest=8), norms=st.booleans())
def test_k_and_v_lie_where_the_reference_writes_them(shape: Shape, *, norms: bool) -> None:
    check_heads(shape, norms=norms)


@pytest.mark.verify
@settings(max_examples=100, derandomize=False)
@given(shape=shapes(longest=24), norms=st.booleans())
def test_k_and_v_lie_where_the_reference_writes_them_over_many_shapes(shape: Shape, *, norms: bool) -> None:
    check_heads(shape, norms=norms)
