"""Paged attention against a loop over single queries in float64."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.layout import KVLayout
from engine.model.attention import PagedKV, attend, plan_step, write_kv
from engine.model.base import ForwardRow
from engine.model.dtypes import TORCH_DTYPES
from engine.model.kv_codec import quantise

HEADS = 6
SHAPES = [(0, 1), (0, 5), (31, 1), (32, 1), (40, 9), (200, 1), (13, 70), (0, 64), (130, 1)]  # start, queries


def rows_of(shapes: list[tuple[int, int]], blocks: list[int], block_size: int) -> list[ForwardRow]:
    rows = []
    for start, count in shapes:
        table = [blocks.pop() for _ in range(-(-(start + count) // block_size))]
        rows.append(ForwardRow([0] * count, start, table, write=True, logits=True))
    return rows


def one_by_one(
    pool: NDArray[np.float64], layer: int, q_TAD: NDArray[np.float64], rows: list[ForwardRow], window: int | None
) -> NDArray[np.float64]:
    """The definition: softmax(q k / sqrt(D)) v over the positions a query may see."""
    kv_heads, block_size, head_dim = pool.shape[1], pool.shape[4], pool.shape[5]
    out, token = np.empty_like(q_TAD), 0
    for row in rows:
        for position in range(row.start, row.start + len(row.tokens)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = [(row.table[p // block_size], p % block_size) for p in range(first, position + 1)]
            for head in range(q_TAD.shape[1]):
                kv = np.stack([pool[b, head * kv_heads // q_TAD.shape[1], layer, :, o] for b, o in seen])
                scores = kv[:, 0] @ q_TAD[token, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ kv[:, 1]
            token += 1
    return out


@pytest.mark.parametrize("window", [None, 1, 17, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_is_its_definition(block_size: int, kv_heads: int, window: int | None) -> None:
    layout = KVLayout(layers=3, kv_heads=kv_heads, head_dim=8, block_size=block_size, dtype="float32")
    rng = np.random.default_rng(kv_heads)
    blocks = rng.permutation(200 if block_size == 4 else 60).tolist()
    pool = np.full((len(blocks), layout.block_bytes), 0xFF, dtype=np.uint8)
    view = pool.view(np.float32).reshape(layout.shape(len(blocks)))
    rows = rows_of(SHAPES, blocks, block_size)
    for row in rows:
        for position in range(row.start):
            view[row.table[position // block_size], :, :, :, position % block_size] = rng.normal(
                size=(kv_heads, 3, 2, 8)
            )
    kv = PagedKV(pool, layout)
    step = plan_step(rows, kv, HEADS, window)
    tokens = len(step.positions)
    q_TAD = rng.normal(size=(tokens, HEADS, 8)).astype(np.float32)
    write_kv(kv, 1, torch.from_numpy(rng.normal(size=(tokens, 2, kv_heads, 8)).astype(np.float32)), step)
    found = attend(kv, 1, torch.from_numpy(q_TAD), step).numpy()
    expected = one_by_one(view.astype(np.float64), 1, q_TAD.astype(np.float64), rows, window)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [4, 16])
def test_written_vectors_lie_where_the_layout_says(block_size: int) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=block_size, dtype="float32")
    pool = np.zeros((40, layout.block_bytes), dtype=np.uint8)
    view = pool.view(np.float32).reshape(layout.shape(40))
    rows = [
        ForwardRow([0] * 5, 14, list(range(30, 20, -1)), write=True, logits=False),
        ForwardRow([0], 7, [3, 2], write=False, logits=True),
        ForwardRow([0] * 2, 0, [9], write=True, logits=True),
    ]
    kv = PagedKV(pool, layout)
    step = plan_step(rows, kv, 2, None)
    values = torch.arange(1, 8 * 2 * 2 * 8 + 1, dtype=torch.float32).view(8, 2, 2, 8)
    write_kv(kv, 2, values, step)
    token, expected = 0, np.zeros_like(view)
    for row in rows:
        for position in range(row.start, row.start + len(row.tokens)):
            if row.write:
                place = expected[row.table[position // block_size], :, 2, :, position % block_size]
                place[...] = values[token].numpy().transpose(1, 0, 2)
            token += 1
    np.testing.assert_array_equal(view, expected)
    assert step.last_tokens.tolist() == [5, 7]


@pytest.mark.parametrize(("stored", "read"), [("int8", "float32"), ("int8", "bfloat16"), ("bfloat16", "float32")])
def test_what_is_attended_to_is_what_was_stored(stored: str, read: str) -> None:
    """The same attention over a pool of plain values: those that the stored ones stand for."""
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype=stored)
    rng, blocks = np.random.default_rng(5), list(range(200))
    pool = np.full((len(blocks), layout.block_bytes), 0xFF, dtype=np.uint8)
    rows = rows_of(SHAPES, blocks, 4)
    dtype = TORCH_DTYPES[read]
    kv = PagedKV(pool, layout, dtype)
    whole = [ForwardRow([0] * (r.start + len(r.tokens)), 0, r.table, write=True, logits=False) for r in rows]
    step = plan_step(whole, kv, HEADS, None)
    every = torch.from_numpy(rng.normal(size=(len(step.positions), 2, 2, 8))).to(dtype)
    write_kv(kv, 1, every, step)

    plain = PagedKV(
        np.zeros((200, dataclasses.replace(layout, dtype=read).block_bytes), dtype=np.uint8),
        layout=dataclasses.replace(layout, dtype=read),
    )
    if stored == "int8":
        q, scale = quantise(every)
        held = q.float() * scale.unsqueeze(-1)
    else:
        held = every.to(TORCH_DTYPES[stored])
    write_kv(plain, 1, held.to(dtype), plan_step(whole, plain, HEADS, None))
    steps = [plan_step(rows, each, HEADS, None) for each in (kv, plain)]
    q_TAD = torch.from_numpy(rng.normal(size=(len(steps[0].positions), HEADS, 8))).to(dtype)
    found, expected = (attend(each, 1, q_TAD, step) for each, step in zip((kv, plain), steps, strict=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.isfinite(found).all()


def test_a_block_of_int8_is_the_same_bytes_however_it_was_chunked() -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="int8")
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(10, 2, 2, 8)).astype(np.float32))
    pools = []
    for chunks in ((10,), (1, 4, 5), (3, 3, 3, 1)):
        pool = np.full((6, layout.block_bytes), 0xFF, dtype=np.uint8)
        kv, done = PagedKV(pool, layout), 0
        for count in chunks:
            row = ForwardRow([0] * count, done, [5, 0, 2], write=True, logits=False)
            write_kv(kv, 1, values[done : done + count], plan_step([row], kv, 2, None))
            done += count
        pools.append(pool)
    written = (pools[0] != 0xFF).any(axis=1)
    assert written.tolist() == [True, False, True, False, False, True]
    for other in pools[1:]:
        np.testing.assert_array_equal(pools[0], other)


def test_no_group_is_padded_to_more_than_twice_a_row(tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
    kv = PagedKV(np.zeros((2000, layout.block_bytes), dtype=np.uint8), layout)
    lengths = [1, 100, 130, 300, 600, 1000, 4000, 2100, 5000]
    rows = rows_of([(length - 1, 1) for length in lengths], list(range(2000)), 16)
    step = plan_step(rows, kv, 1, None)
    gathered = sum(len(group.pages) // 2 for group in step.groups)
    assert sum(group.rows for group in step.groups) == len(rows)
    assert gathered <= 2 * sum(max(len(row.table), 8) for row in rows)
