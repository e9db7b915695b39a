"""Attention that reads the block pool in place: one scan over positions, used by decode and by prefill.

1. `_scan` runs a tile of queries over a range of positions, tile by tile, as FlashAttention does (Dao et al. 2022): it
   keeps each query's maximum and sum, so no score is ever stored. The tiles are counted from position 0 whatever the
   range, and what a query may not see adds an exact zero.
2. Decode, one query a sequence: a program takes one kv head and one *span* of positions, its tile is the query heads
   that share the kv head; then `_merge` joins the spans, in order (split-KV, Dao et al. 2023). A span depends on its
   own sequence's length alone.
3. Prefill, many queries a sequence: a program takes one query head and a tile of queries, and scans all they see.

So what a sequence gets does not depend on who else is in the step. A position at or beyond a sequence's length is never
loaded: it may hold NaN. Offsets into the pool are 64 bit.

Shapes: T tokens of the step, A query heads, K kv heads, G = A / K, D head_dim, R rows, B entries of a table, M queries
and N positions of a tile, S spans. Sizes named in capitals are known when a kernel is compiled.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.layout import KVLayout

_SMALLEST_DOT = 16  # rows, columns and depth that tensor cores take at least
_UNLIMITED = 1 << 30
INTERPRETED: bool = triton.knobs.runtime.interpret
WIDENED = tl.constexpr(INTERPRETED)  # the interpreter multiplies bfloat16 as if it were whole numbers (Triton 3.7)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool as kernels see it. `elements`: the whole pool, flat, in the layout's dtype."""

    elements: torch.Tensor
    layout: KVLayout

    @property
    def head_stride(self) -> int:
        layout = self.layout
        return layout.layers * 2 * layout.block_size * layout.head_dim

    @property
    def block_stride(self) -> int:
        return self.layout.kv_heads * self.head_stride

    def layer_offset(self, layer: int) -> int:
        """Elements from a head's first layer to `layer`."""
        return layer * 2 * self.layout.block_size * self.layout.head_dim


@dataclass(frozen=True, slots=True)
class RowsIndex:
    """A step's rows on the device, int64. `starts`: position of a row's first token; `counts`: its tokens."""

    first_tokens_R: torch.Tensor
    starts_R: torch.Tensor
    counts_R: torch.Tensor
    tables_RB: torch.Tensor


@dataclass(frozen=True, slots=True)
class TileShape:
    """`queries` and `positions` of a tile; decode reads spans of `span` positions, longer ones above `spans` of them.

    256 positions a span: enough programs for one sequence of 4k on a large GPU, few enough results to merge. Small
    values are for tests: they meet every edge with few tokens.
    """

    queries: int
    positions: int
    span: int = 256
    spans: int = 64


def tile_shape(layout: KVLayout) -> TileShape:
    """Tiles that fit registers and shared memory (100 kB) of GPUs since 2020, as their compiler counts. Not tuned yet.

    float32 goes without tensor cores, whose products are not exact: larger tiles of it leave the registers.
    """
    vector_bytes = triton.next_power_of_2(layout.head_dim) * layout.item_bytes
    positions = max(_SMALLEST_DOT, min(64, (16 << 10) // vector_bytes))
    return TileShape(queries=16 if layout.item_bytes > 2 else positions, positions=positions)


@triton.jit
def _product(left, right):
    """Matrix product with float32 sums, exact in its inputs: float32 is not cut to TF32."""
    if WIDENED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _scan(q_MD, seen_by_M, pool, table, first, end, window, block_stride, scale,
          PAGE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Queries at positions `seen_by_M` over [first, end). `pool`: K of this head and layer in block 0.

    Returns values [M, D], maxima [M] and sums [M], all float32; the values are not divided by the sums yet.
    """
    d = tl.arange(0, BLOCK_D)
    top_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    value_MD = tl.zeros((M, BLOCK_D), tl.float32)
    for tile in range(first // N * N, end, N):
        key_N = tile + tl.arange(0, N)
        there_N = (key_N >= first) & (key_N < end)
        block_N = tl.load(table + key_N // PAGE, mask=there_N, other=0).to(tl.int64)
        place_ND = (block_N * block_stride + (key_N % PAGE) * D)[:, None] + d[None, :]
        loaded_ND = there_N[:, None] & (d < D)[None, :]
        k_ND = tl.load(pool + place_ND, mask=loaded_ND, other=0.0)
        score_MN = _product(q_MD, tl.trans(k_ND)) * scale
        distance_MN = seen_by_M[:, None] - key_N[None, :]
        seen_MN = there_N[None, :] & (distance_MN >= 0) & (distance_MN < window)
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(score_MN, 1))
        finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # who has seen nothing yet: -inf - -inf is NaN
        weight_MN = tl.exp2(score_MN - finite_M[:, None])
        kept_M = tl.exp2(top_M - finite_M)
        v_ND = tl.load(pool + PAGE * D + place_ND, mask=loaded_ND, other=0.0)
        value_MD = value_MD * kept_M[:, None] + _product(weight_MN.to(v_ND.dtype), v_ND)
        sum_M = sum_M * kept_M + tl.sum(weight_MN, 1)
        top_M = new_M
    return value_MD, top_M, sum_M


@triton.jit(do_not_specialize=["table_stride", "spans"])
def _decode(values, tops, sums, q, pool, rows, first_tokens, starts, tables, table_stride, spans,
            window, block_stride, head_stride, scale, MIN: tl.constexpr, MAX: tl.constexpr, A: tl.constexpr,
            G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """One row, one kv head, one span. `values` [rows, A, spans, D], `tops` and `sums` [rows, A, spans]."""
    place, head, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + place)
    position = tl.load(starts + row).to(tl.int32)
    size = MIN * tl.maximum(1, tl.cdiv(position + 1, MIN * MAX))
    first = tl.maximum(span * size, position + 1 - window)
    end = tl.minimum((span + 1) * size, position + 1)
    if first >= end:
        return
    g = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    is_head = g < G
    stored = is_head[:, None] & (d < D)[None, :]
    heads = head * G + g
    q_MD = tl.load(q + (tl.load(first_tokens + row) * A + heads)[:, None] * D + d[None, :], mask=stored, other=0.0)
    value_MD, top_M, sum_M = _scan(q_MD, tl.full((M,), 0, tl.int32) + position, pool + head.to(tl.int64) * head_stride,
                                   tables + row * table_stride, first, end, window, block_stride, scale,
                                   PAGE, D, M, N, BLOCK_D)  # fmt: skip
    out_M = (place * A + heads) * spans + span
    tl.store(values + out_M[:, None] * D + d[None, :], value_MD, mask=stored)
    tl.store(tops + out_M, top_M, mask=is_head)
    tl.store(sums + out_M, sum_M, mask=is_head)


@triton.jit(do_not_specialize=["spans"])
def _merge(out, values, tops, sums, rows, first_tokens, starts, spans, window, MIN: tl.constexpr, MAX: tl.constexpr,
           A: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Join the spans of one row and one query head, from the first that the window reaches."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    length = tl.load(starts + row).to(tl.int32) + 1
    size = MIN * tl.maximum(1, tl.cdiv(length, MIN * MAX))
    d = tl.arange(0, BLOCK_D)
    base = (place * A + head) * spans
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    value_D = tl.zeros((BLOCK_D,), tl.float32)
    for span in range(tl.maximum(length - window, 0) // size, tl.cdiv(length, size)):
        span_top = tl.load(tops + base + span)  # finite: every span of these holds a position that is seen
        new = tl.maximum(top, span_top)
        kept, factor = tl.exp2(top - new), tl.exp2(span_top - new)
        value_D = value_D * kept + tl.load(values + (base + span) * D + d, mask=d < D, other=0.0) * factor
        total = total * kept + tl.load(sums + base + span) * factor
        top = new
    target = out + (tl.load(first_tokens + row) * A + head) * D + d
    tl.store(target, (value_D / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(out, q, pool, tile_rows, tile_firsts, first_tokens, starts, counts, tables, table_stride,
             window, block_stride, head_stride, scale, A: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr,
             D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One tile of a row's queries, from its query number `tile_firsts`, and one query head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    tile_first = tl.load(tile_firsts + tile).to(tl.int32)
    count = tl.load(counts + row).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    query_M = tile_first + tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    real_MD = (query_M < count)[:, None] & (d < D)[None, :]
    place_MD = ((tl.load(first_tokens + row) + query_M) * A + head)[:, None] * D + d[None, :]
    q_MD = tl.load(q + place_MD, mask=real_MD, other=0.0)
    end = start + tl.minimum(tile_first + M, count)
    first = tl.maximum(start + tile_first + 1 - window, 0)
    value_MD, _, sum_M = _scan(q_MD, start + query_M, pool + (head // G).to(tl.int64) * head_stride,
                               tables + row * table_stride, first, end, window, block_stride, scale,
                               PAGE, D, M, N, BLOCK_D)  # fmt: skip
    sum_M = tl.where(query_M < count, sum_M, 1.0)  # queries that are none may have seen nothing
    tl.store(out + place_MD, (value_MD / sum_M[:, None]).to(out.dtype.element_ty), mask=real_MD)


def decode_attention(
    out_TAD: torch.Tensor,
    q_TAD: torch.Tensor,
    pool: PoolView,
    layer: int,
    rows: RowsIndex,
    which: torch.Tensor,
    *,
    longest: int,
    window: int | None,
    tile: TileShape,
) -> None:
    """Attention of the rows `which` (int64, each of one token) into their places in `out_TAD`; K and V are in the pool.

    `longest`: their greatest length, the query's own position included. Source: Dao et al. 2023, "Flash-Decoding".
    """
    layout, heads, count = pool.layout, q_TAD.shape[1], len(which)
    spans = min(tile.spans, -(-longest // tile.span))  # no shorter row has more
    values = q_TAD.new_empty((count, heads, spans, layout.head_dim), dtype=torch.float32)
    tops, sums = q_TAD.new_empty((2, count, heads, spans), dtype=torch.float32)
    group = heads // layout.kv_heads
    limit = _UNLIMITED if window is None else window
    block_d = max(_SMALLEST_DOT, triton.next_power_of_2(layout.head_dim))
    _decode[count, layout.kv_heads, spans](
        values, tops, sums, q_TAD, pool.elements[pool.layer_offset(layer) :], which, rows.first_tokens_R, rows.starts_R,
        rows.tables_RB, rows.tables_RB.stride(0), spans, limit, pool.block_stride, pool.head_stride,
        _scale(layout.head_dim), MIN=tile.span, MAX=tile.spans, A=heads, G=group, PAGE=layout.block_size,
        D=layout.head_dim, M=max(_SMALLEST_DOT, triton.next_power_of_2(group)), N=tile.positions, BLOCK_D=block_d,
    )  # fmt: skip
    _merge[count, heads](
        out_TAD, values, tops, sums, which, rows.first_tokens_R, rows.starts_R, spans, limit,
        MIN=tile.span, MAX=tile.spans, A=heads, D=layout.head_dim, BLOCK_D=block_d,
    )  # fmt: skip


def prefill_attention(
    out_TAD: torch.Tensor,
    q_TAD: torch.Tensor,
    pool: PoolView,
    layer: int,
    rows: RowsIndex,
    tiles: tuple[torch.Tensor, torch.Tensor],
    *,
    window: int | None,
    tile: TileShape,
) -> None:
    """Causal attention of the `tiles` (row and first query of each, int64) into their places in `out_TAD`."""
    layout, heads = pool.layout, q_TAD.shape[1]
    _prefill[len(tiles[0]), heads](
        out_TAD, q_TAD, pool.elements[pool.layer_offset(layer) :], *tiles, rows.first_tokens_R, rows.starts_R,
        rows.counts_R, rows.tables_RB, rows.tables_RB.stride(0), _UNLIMITED if window is None else window,
        pool.block_stride, pool.head_stride, _scale(layout.head_dim), A=heads, G=heads // layout.kv_heads,
        PAGE=layout.block_size, D=layout.head_dim, M=max(_SMALLEST_DOT, tile.queries), N=tile.positions,
        BLOCK_D=max(_SMALLEST_DOT, triton.next_power_of_2(layout.head_dim)),
    )  # fmt: skip


def _scale(head_dim: int) -> float:
    """On scores whose exponentials are powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)
