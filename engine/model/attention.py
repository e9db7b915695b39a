"""Paged attention over the block pool: the torch reference.

The pool `[num_blocks, kv_heads, layers, 2, page]` is contiguous, so it is also a plain table of *pages* (block_size
vectors, then their scales where there are any), and of vectors (one per block, head, layer, K or V, position). All
index tensors of a step are made once, for layer 0, and serve every layer by adding a constant.

1. `plan_step` turns ragged rows into one write index and a few groups of rows of similar shape.
2. Per layer `write_kv` scatters the step's K and V into the pool.
3. Per layer `attend` gathers each group's pages, one copy, and runs one dense attention per group.

Positions at or beyond a row's length are zeroed after the gather: a free position may hold NaN, and 0 x NaN is NaN even
under a mask.

Shapes: T tokens of the step, R rows of a group, Q queries per row (padded), A query heads, K kv heads, G = A / K,
B pages per row (padded), P = block_size, S = B x P key positions, D head_dim, W tokens written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.layout import KVLayout
from engine.model.base import ForwardRow
from engine.model.dtypes import KV_DTYPES
from engine.model.kv_codec import open_pages, quantise

_SMALLEST_BUCKET = 8  # pages or queries: below this, padding is cheaper than another group

_Index = NDArray[np.int64]
PoolBytes = NDArray[np.uint8] | torch.Tensor


class PagedKV:
    """The pool's bytes as tensors, on whatever device they are. Holds no copy.

    `dtype`: of what is written and read, whatever it is stored in.
    """

    def __init__(self, pool: PoolBytes, layout: KVLayout, dtype: torch.dtype | None = None) -> None:
        """`pool`: uint8 [num_blocks, block_bytes], contiguous. Raises ModelError when it is not that.

        `dtype` None: as stored, float32 for what has scales.
        """
        contiguous = pool.flags.c_contiguous if isinstance(pool, np.ndarray) else pool.is_contiguous()
        if pool.ndim != 2 or pool.shape[1] != layout.block_bytes or not contiguous:
            raise ModelError(f"pool of shape {[*pool.shape]} is not contiguous blocks of {layout.block_bytes} bytes")
        self.layout = layout
        self.num_blocks = pool.shape[0]
        flat = (torch.from_numpy(pool) if isinstance(pool, np.ndarray) else pool).view(-1)
        self.elements = flat.view(KV_DTYPES[layout.dtype])
        self.pages_MX = self.elements.view(-1, layout.page_bytes // layout.item_bytes)
        self.dtype = dtype or (torch.float32 if layout.scale_bytes else self.elements.dtype)

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """An index array where the pool is."""
        return torch.from_numpy(array).to(self.elements.device)

    def write(self, vectors: torch.Tensor, x_WD: torch.Tensor) -> None:
        """Store vectors; `vectors`: page * block_size + position within it."""
        size, dim = self.layout.block_size, self.layout.head_dim
        if not self.layout.scale_bytes:
            self.elements.view(-1, dim).index_copy_(0, vectors, x_WD.to(self.elements.dtype))
            return
        q_WD, scale_W = quantise(x_WD)
        page, at = vectors // size, vectors % size
        self.pages_MX[:, : size * dim].view(-1, size, dim)[page, at] = q_WD
        self.pages_MX[:, size * dim :].view(torch.float32)[page, at] = scale_W

    def gather(self, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Read pages into `out`, [pages, block_size x head_dim] in this `dtype`; returns it."""
        if self.elements.dtype is out.dtype:
            return torch.index_select(self.pages_MX, 0, pages, out=out)
        return out.copy_(open_pages(self.pages_MX.index_select(0, pages), self.layout).view_as(out))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are run as one dense attention.

    `tokens`: [R x Q] indices into the step's tokens; padding repeats a row's last token. `real`: indices of the entries
    of `tokens` that are no padding, None when all are. `pages`: [2 x R x K x B] of layer 0. `gathered`: room for them,
    the same for every layer (fresh memory per layer made attention a third slower). `void`: vectors of the gathered
    [2 x R x K x S] beyond their row's length. `mask`: [R, 1, Q x G, S], 0 or -inf, in the dtype of what is read.
    """

    rows: int
    tokens: torch.Tensor
    real: torch.Tensor | None
    pages: torch.Tensor
    gathered: torch.Tensor
    void: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What a step's layers share. `vectors`: [W x 2 x K] of layer 0. `written`: token indices, None when all write."""

    positions: torch.Tensor
    last_tokens: torch.Tensor  # of the rows that want logits
    vectors: torch.Tensor
    written: torch.Tensor | None
    groups: tuple[RowGroup, ...]


def plan_step(rows: Sequence[ForwardRow], kv: PagedKV, heads: int, window: int | None) -> StepIndex:
    """Index tensors for one forward. Raises ModelError for a row whose tokens and table do not fit each other."""
    layout = kv.layout
    check_rows(rows, kv)
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    first_token = np.cumsum(lengths) - lengths
    positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens), dtype=np.int64) for row in rows])
    last_tokens = (first_token + lengths - 1)[[row.logits for row in rows]]
    writes = np.repeat(np.array([row.write for row in rows]), lengths)
    tables = [np.array(row.table, dtype=np.int64) for row in rows]
    blocks = np.concatenate(
        [
            table[np.arange(row.start, row.start + len(row.tokens)) // layout.block_size]
            for row, table in zip(rows, tables, strict=True)
        ]
    )
    vectors_W2K = (
        _pages(blocks, layout).transpose(1, 0, 2) * layout.block_size + (positions % layout.block_size)[:, None, None]
    )
    all_write = bool(writes.all())
    groups = tuple(
        _group([rows[r] for r in members], [tables[r] for r in members], first_token[members], kv, (heads, window))
        for members in _buckets(rows, layout.block_size)
    )
    return StepIndex(
        positions=kv.tensor(positions),
        last_tokens=kv.tensor(last_tokens),
        vectors=kv.tensor(np.ascontiguousarray(vectors_W2K if all_write else vectors_W2K[writes]).reshape(-1)),
        written=None if all_write else kv.tensor(np.nonzero(writes)[0]),
        groups=groups,
    )


def write_kv(kv: PagedKV, layer: int, kv_T2KD: torch.Tensor, step: StepIndex) -> None:
    """Store K and V of the step's writing tokens in the pool."""
    if step.written is not None:
        if not len(step.written):
            return
        kv_T2KD = kv_T2KD.index_select(0, step.written)
    offset = 2 * layer * kv.layout.block_size
    kv.write(step.vectors + offset, kv_T2KD.reshape(-1, kv.layout.head_dim))


def attend(kv: PagedKV, layer: int, q_TAD: torch.Tensor, step: StepIndex) -> torch.Tensor:
    """Causal attention of every query over the pool's positions [0, its own]. Returns [T, A, D]."""
    if len(step.groups) == 1 and step.groups[0].real is None:
        return _attend_group(kv, layer, q_TAD, step.groups[0]).view_as(q_TAD)
    out_TAD = torch.empty_like(q_TAD, memory_format=torch.contiguous_format)
    for group in step.groups:
        attended = _attend_group(kv, layer, q_TAD.index_select(0, group.tokens), group).view(-1, *q_TAD.shape[1:])
        if group.real is None:
            out_TAD.index_copy_(0, group.tokens, attended)
        else:
            out_TAD.index_copy_(0, group.tokens[group.real], attended.index_select(0, group.real))
    return out_TAD


def _attend_group(kv: PagedKV, layer: int, q_NAD: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """`q_NAD`: the group's R x Q queries, padding included. Returns as many vectors, [R, Q, K, G, D]."""
    layout = kv.layout
    rows, kv_heads, head_dim = group.rows, layout.kv_heads, layout.head_dim
    gathered = kv.gather(group.pages + 2 * layer, group.gathered)
    gathered.view(-1, head_dim).index_fill_(0, group.void, 0)
    k_RKSD, v_RKSD = gathered.view(2, rows, kv_heads, -1, head_dim)
    # The G query heads that share a kv head are folded into the query axis: K and V are never repeated.
    q_RQKGD = q_NAD.reshape(rows, -1, kv_heads, q_NAD.shape[1] // kv_heads, head_dim)
    queries, group_heads = q_RQKGD.shape[1], q_RQKGD.shape[3]
    q_RKND = q_RQKGD.transpose(1, 2).reshape(rows, kv_heads, queries * group_heads, head_dim)
    out_RKND = F.scaled_dot_product_attention(q_RKND, k_RKSD, v_RKSD, attn_mask=group.mask)
    out_RKQGD = out_RKND.reshape(rows, kv_heads, queries, group_heads, head_dim)
    return out_RKQGD.transpose(1, 2).contiguous()


def check_rows(rows: Sequence[ForwardRow], kv: PagedKV) -> None:
    """Raises ModelError for a row whose tokens and table do not fit each other or the pool."""
    for index, row in enumerate(rows):
        if not row.tokens or row.start < 0:
            raise ModelError(f"row {index}: {len(row.tokens)} tokens at position {row.start}")
        pages = -(-(row.start + len(row.tokens)) // kv.layout.block_size)
        if len(row.table) < pages:
            raise ModelError(f"row {index}: a table of {len(row.table)} blocks, needs {pages}")
        if min(row.table) < 0 or max(row.table) >= kv.num_blocks:
            raise ModelError(f"row {index}: a block outside of 0..{kv.num_blocks - 1}")


def _pages(blocks: _Index, layout: KVLayout) -> _Index:
    """Pages of K and V of every head of layer 0: blocks [...] -> [2, ..., K]."""
    heads = blocks[..., None] * layout.kv_heads + np.arange(layout.kv_heads)
    keys = heads * (2 * layout.layers)
    return np.stack((keys, keys + 1))


def _buckets(rows: Sequence[ForwardRow], block_size: int) -> list[list[int]]:
    """Row indices by powers of two of query and page count: padding at most doubles the work of a row."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        queries = len(row.tokens)
        pages = -(-(row.start + queries) // block_size)
        key = (
            0 if queries == 1 else max(queries, _SMALLEST_BUCKET).bit_length(),
            max(pages - 1, _SMALLEST_BUCKET - 1).bit_length(),
        )
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _group(
    rows: list[ForwardRow], tables: list[_Index], first_token: _Index, kv: PagedKV, shape: tuple[int, int | None]
) -> RowGroup:
    """One bucket's index tensors. `shape`: query heads and window."""
    layout, (heads, window) = kv.layout, shape
    page_size = layout.block_size
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    # With a window the pages before the first query's reach are not read at all.
    first_page = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0) // page_size
    end_page = -(-(starts + counts) // page_size)
    queries, pages = int(counts.max()), int((end_page - first_page).max())

    table_RB = np.empty((len(rows), pages), dtype=np.int64)
    for r, table in enumerate(tables):
        used = table[first_page[r] : end_page[r]]
        table_RB[r, : len(used)] = used
        table_RB[r, len(used) :] = used[0]  # any readable page: all of it is void
    pages_2RKB = _pages(table_RB, layout).transpose(0, 1, 3, 2)

    key_RS = first_page[:, None] * page_size + np.arange(pages * page_size)
    void_r, void_s = np.nonzero(key_RS >= (starts + counts)[:, None])
    plane_2RK = np.arange(2 * len(rows) * layout.kv_heads).reshape(2, len(rows), layout.kv_heads)
    void = plane_2RK[:, void_r] * (pages * page_size) + void_s[:, None]

    local_RQ = np.minimum(np.arange(queries), (counts - 1)[:, None])
    query_RQ = starts[:, None] + local_RQ
    hidden_RQS = key_RS[:, None, :] > query_RQ[:, :, None]
    if window is not None:
        hidden_RQS |= key_RS[:, None, :] <= query_RQ[:, :, None] - window
    mask_RQS = kv.pages_MX.new_zeros(hidden_RQS.shape, dtype=kv.dtype)
    mask_RQS.masked_fill_(kv.tensor(hidden_RQS), float("-inf"))
    real = np.nonzero((np.arange(queries) < counts[:, None]).reshape(-1))[0]
    return RowGroup(
        rows=len(rows),
        tokens=kv.tensor((first_token[:, None] + local_RQ).reshape(-1)),
        real=None if len(real) == len(rows) * queries else kv.tensor(real),
        pages=kv.tensor(np.ascontiguousarray(pages_2RKB).reshape(-1)),
        gathered=kv.pages_MX.new_empty((pages_2RKB.size, page_size * layout.head_dim), dtype=kv.dtype),
        void=kv.tensor(void.reshape(-1)),
        mask=mask_RQS.repeat_interleave(heads // layout.kv_heads, dim=1).unsqueeze(1),
    )
