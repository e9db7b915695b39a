"""Every kernel of engine/gpu against plain torch on the device itself: the figures of `python -m benchmarks.gpu`."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F

from cluster.core.digest import digest_block
from engine.gpu.kernels.attention import PoolView, decode_attention, prefill_attention, tile_shape
from engine.gpu.kernels.digest import copy_blocks, digest_blocks
from engine.gpu.kernels.heads import add_norm, rotate_and_write
from engine.gpu.operators import plan
from engine.layout import KVLayout
from engine.model.attention import PagedKV, attend, plan_step, write_kv
from engine.model.base import ForwardRow
from engine.model.config import RopeConfig
from engine.model.dtypes import TORCH_DTYPES
from engine.model.rope import Rope, rotate

TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 7)
ROWS = ((0, 1), (16, 1), (300, 1), (4100, 1), (0, 37), (250, 130))  # start, tokens
DRY_ROWS = ((20, 1), (3, 18))
Shapes = tuple[tuple[int, int], ...]
BLOCK, KV_HEADS, LAYER, EPS = 16, 2, 1, 1e-5


@dataclass(frozen=True, slots=True)
class Check:
    """How far a kernel is from its reference at worst, over `cases`."""

    kernel: str
    cases: int
    worst: float  # as a part of the tolerance of its dtype; exact ones have 0 or infinity

    @property
    def ok(self) -> bool:
        return self.worst <= 1


def check_all(device: torch.device, *, dry: bool) -> list[Check]:
    """Every kernel over dtypes, head sizes, group sizes and odd lengths; and a pool beyond 2^31 elements."""
    dims, groups, rows = (HEAD_DIMS[:2], GROUPS[1:2], DRY_ROWS) if dry else (HEAD_DIMS, GROUPS, ROWS)
    found: dict[str, list[float]] = {}
    for dtype, head_dim, group in product(TOLERANCE, dims, groups):
        layout = KVLayout(2, KV_HEADS, head_dim, BLOCK, dtype)
        for name, error in (*_attention(layout, group, rows, device), *_heads(layout, group, rows, device)):
            found.setdefault(name, []).append(error / TOLERANCE[dtype])
        found.setdefault("digest, copy", []).append(0.0 if _digests(layout, device) else float("inf"))
    if not dry:
        found["attention beyond 2^31 elements"] = [_far(device) / TOLERANCE["bfloat16"]]
    return [Check(name, len(errors), max(errors)) for name, errors in found.items()]


def pool_of(layout: KVLayout, rows: Shapes, device: torch.device) -> tuple[PagedKV, list[ForwardRow]]:
    """NaN wherever no row has a position, noise elsewhere; blocks in shuffled order."""
    pages = [-(-(start + count) // layout.block_size) for start, count in rows]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist()
    pool = torch.empty((len(order), layout.block_bytes), dtype=torch.uint8, device=device)
    kv = PagedKV(pool, layout)
    view = kv.elements.view(layout.shape(len(order)))
    view.normal_()
    result = []
    for (start, count), used in zip(rows, pages, strict=True):
        table = [order.pop() for _ in range(used)]
        view[table[-1], :, :, :, (start + count - 1) % layout.block_size + 1 :] = float("nan")
        result.append(ForwardRow([0] * count, start, table, write=True, logits=True))
    return kv, result


def _attention(layout: KVLayout, group: int, shapes: Shapes, device: torch.device) -> Iterator[tuple[str, float]]:
    kv, rows = pool_of(layout, shapes, device)
    q_TAD = _noise((sum(count for _, count in shapes), KV_HEADS * group, layout.head_dim), layout, device)
    for window in (None, 100):
        expected = attend(kv, LAYER, q_TAD, plan_step(rows, kv, q_TAD.shape[1], window))
        decoded = torch.tensor([count == 1 for _, count in shapes for _ in range(count)], device=device)
        found = attention(kv, rows, q_TAD, window, device)
        yield "attention, decode", _error(found[decoded], expected[decoded])
        yield "attention, prefill", _error(found[~decoded], expected[~decoded])


def attention(
    kv: PagedKV, rows: list[ForwardRow], q_TAD: torch.Tensor, window: int | None, device: torch.device
) -> torch.Tensor:
    """What the kernels make of the rows."""
    tile = tile_shape(kv.layout)
    step, pool, out_TAD = (
        plan(rows, kv.layout.block_size, tile, device),
        PoolView(kv.elements, kv.layout),
        q_TAD.clone(),
    )
    if len(step.decodes):
        decode_attention(
            out_TAD, q_TAD, pool, LAYER, step.rows, step.decodes, longest=step.longest, window=window, tile=tile
        )
    if len(step.tiles[0]):
        prefill_attention(out_TAD, q_TAD, pool, LAYER, step.rows, step.tiles, window=window, tile=tile)
    return out_TAD


def _heads(layout: KVLayout, group: int, shapes: Shapes, device: torch.device) -> Iterator[tuple[str, float]]:
    kv, rows = pool_of(layout, shapes, device)
    own = PagedKV(kv.elements.view(torch.uint8).view(-1, layout.block_bytes).clone(), layout)
    heads, step = KV_HEADS * group, plan_step(rows, kv, KV_HEADS * group, None)
    qkv_TND = _noise((len(step.positions), heads + 2 * KV_HEADS, layout.head_dim), layout, device)
    norm = _noise((heads + KV_HEADS, layout.head_dim), layout, device)
    angles = Rope(RopeConfig("default", 10_000.0), layout.head_dim, device).angles(step.positions)
    rotated = rotate(F.rms_norm(qkv_TND[:, :-KV_HEADS], (layout.head_dim,), None, EPS) * norm, angles)
    write_kv(kv, LAYER, torch.stack((rotated[:, heads:], qkv_TND[:, -KV_HEADS:]), dim=1), step)
    slots = plan(rows, layout.block_size, tile_shape(layout), device).slots_T
    q_TAD = rotate_and_write(qkv_TND, norm, EPS, angles, PoolView(own.elements, layout), LAYER, slots)
    # A rotated vector is as long as it was: rounding counts beside the largest part of it.
    yield "norm, rotation", _error(q_TAD, rotated[:, :heads])
    yield "K and V into the pool", _error(own.elements.nan_to_num(), kv.elements.nan_to_num())
    width = heads * layout.head_dim
    x_TE = torch.randn((5, width), device=device)
    delta_TE, weight_E = _noise((5, width), layout, device), _noise((width,), layout, device)
    expected = F.rms_norm(x_TE + delta_TE, (width,), None, EPS).to(weight_E.dtype) * weight_E
    yield "residual sum, norm", _error(add_norm(x_TE, delta_TE, weight_E, EPS), expected)


def _digests(layout: KVLayout, device: torch.device) -> bool:
    source, target = (torch.randint(0, 256, (6, layout.block_bytes), dtype=torch.uint8).to(device) for _ in range(2))
    sources, targets = torch.tensor([5, 0, 3], device=device), torch.tensor([1, 4, 2], device=device)
    copied = copy_blocks(target, targets, source, sources, layout.kv_heads)
    expected = [digest_block(source[index].cpu().numpy(), layout.kv_heads) for index in (5, 0, 3)]
    again = digest_blocks(target, targets, layout.kv_heads)
    proofs = [[row.tobytes() for row in sums.cpu().numpy()] for sums in (copied, again)]
    return torch.equal(target[targets], source[sources]) and proofs == [expected, expected]


def _far(device: torch.device) -> float:
    """One row whose blocks lie beyond 2^31 elements of a pool, beside the same blocks in a small one."""
    layout = KVLayout(2, KV_HEADS, 128, BLOCK, "bfloat16")
    near, rows = pool_of(layout, ((80, 1), (64, 20)), device)
    size = 2**31 * layout.item_bytes // layout.block_bytes + near.num_blocks
    far = PagedKV(torch.zeros((size, layout.block_bytes), dtype=torch.uint8, device=device), layout)
    first = size - near.num_blocks
    far.elements.view(size, -1)[first:] = near.elements.view(near.num_blocks, -1)
    moved = [ForwardRow(r.tokens, r.start, [first + b for b in r.table], r.write, r.logits) for r in rows]
    q_TAD = _noise((21, 8, 128), layout, device)
    return _error(attention(far, moved, q_TAD, None, device), attention(near, rows, q_TAD, None, device))


def _noise(shape: tuple[int, ...], layout: KVLayout, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(TORCH_DTYPES[layout.dtype])


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative where values are above 1. NaN is infinitely wrong."""
    difference = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
    worst = float(difference.max())
    return worst if worst == worst else float("inf")
