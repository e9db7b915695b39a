"""What a forward does between its products, as Triton kernels. The kernels are in engine/gpu/kernels.

1. `start` turns ragged rows into index arrays and sends them to the device in one copy, from pinned memory.
2. Rows of one token are decoded, all others are cut in tiles of queries; either attention writes into one result.

On a CPU this runs only in Triton's interpreter (TRITON_INTERPRET=1), which is how it is tested.

Shapes: T tokens of the step, R rows, B entries of the widest table, L rows that want logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.gpu.kernels.attention import (
    INTERPRETED,
    PoolView,
    RowsIndex,
    TileShape,
    decode_attention,
    prefill_attention,
    tile_shape,
)
from engine.gpu.kernels.heads import add_norm, rotate_and_write
from engine.layout import KVLayout
from engine.model.attention import PagedKV, check_rows
from engine.model.base import ForwardRow
from engine.model.config import ModelConfig
from engine.model.operators import Forward, wait_for
from engine.model.rope import Rope

_ALIGNED = 2  # int64: parts of one upload start at 16 bytes, or kernels are compiled again for those that do not


class TritonOperators:
    """See engine/model/operators.py."""

    def __init__(self, config: ModelConfig, layout: KVLayout, device: torch.device) -> None:
        """Raises ModelError where no Triton kernel can run."""
        if device.type != "cuda" and not INTERPRETED:
            raise ModelError(f"engine.kernels is triton, but the device is {device}: that needs a GPU")
        self.tile = tile_shape(layout)
        self._config = config
        self._layout = layout
        self._device = device
        self._rope = Rope(config.rope, config.attention.head_dim, device)

    def start(self, kv: PagedKV, rows: Sequence[ForwardRow]) -> Forward:
        """See Operators."""
        check_rows(rows, kv)
        step = plan(rows, self._layout.block_size, self.tile, self._device)
        pool = PoolView(kv.elements, self._layout)
        return _TritonForward(step, self._rope.angles(step.positions_T), pool, self._config, self.tile)


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What a step's layers share, int64 on the device. `slots_T`: block * block_size + offset, -1: not written.

    `decodes`: rows of one token; `tiles`: row and first query of each tile of the others. `longest`: of the decodes.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    last_tokens_L: torch.Tensor
    decodes: torch.Tensor
    tiles: tuple[torch.Tensor, torch.Tensor]
    rows: RowsIndex
    longest: int


def plan(rows: Sequence[ForwardRow], block_size: int, tile: TileShape, device: torch.device) -> StepIndex:
    """Index tensors of one forward over checked rows."""
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in rows])
    tables_RB = np.zeros((len(rows), max(len(row.table) for row in rows)), dtype=np.int64)
    for table_B, row in zip(tables_RB, rows, strict=True):
        table_B[: len(row.table)] = row.table
    owners = np.repeat(np.arange(len(rows)), counts)
    blocks = tables_RB[owners, positions // block_size]
    writes = np.repeat(np.array([row.write for row in rows]), counts)
    decodes = np.flatnonzero(counts == 1)
    tiles = [(row, first) for row in np.flatnonzero(counts > 1) for first in range(0, counts[row], tile.queries)]
    tile_rows, tile_firsts = np.array(tiles, dtype=np.int64).reshape(-1, 2).T
    tokens = np.array([token for row in rows for token in row.tokens], dtype=np.int64)
    slots = np.where(writes, blocks * block_size + positions % block_size, -1)
    last_tokens = (firsts + counts - 1)[[row.logits for row in rows]]
    rows_index = (firsts, starts, counts, tables_RB)
    sent = _upload([tokens, positions, slots, last_tokens, decodes, tile_rows, tile_firsts, *rows_index], device)
    return StepIndex(
        token_ids_T=sent[0],
        positions_T=sent[1],
        slots_T=sent[2],
        last_tokens_L=sent[3],
        decodes=sent[4],
        tiles=(sent[5], sent[6]),
        rows=RowsIndex(sent[7], sent[8], sent[9], sent[10].view(tables_RB.shape)),
        longest=int(starts[decodes].max(initial=-1)) + 1,
    )


def _upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, flat. One copy for all of them, which the CPU does not wait for."""
    starts = np.cumsum([0, *(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)])
    joined = torch.empty(int(starts[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        joined.numpy()[start : start + array.size] = array.reshape(-1)
    there = joined.to(device, non_blocking=True)
    return [there[start : start + array.size] for start, array in zip(starts, arrays, strict=False)]


@dataclass(frozen=True, slots=True)
class _TritonForward:
    """See Forward."""

    step: StepIndex
    angles: tuple[torch.Tensor, torch.Tensor]
    pool: PoolView
    config: ModelConfig
    tile: TileShape

    @property
    def token_ids_T(self) -> torch.Tensor:
        return self.step.token_ids_T

    @property
    def last_tokens_L(self) -> torch.Tensor:
        return self.step.last_tokens_L

    def add_norm(self, x_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor) -> torch.Tensor:
        return add_norm(x_TE, delta_TE, weight_E, self.config.rms_eps)

    def attend(self, layer: int, qkv_TND: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        step, pool, window = self.step, self.pool, self.config.attention.window
        q_TAD = rotate_and_write(qkv_TND, qk_norm, self.config.rms_eps, self.angles, pool, layer, step.slots_T)
        out_TAD = torch.empty_like(q_TAD)
        if len(step.decodes):
            decode_attention(
                out_TAD,
                q_TAD,
                pool,
                layer,
                step.rows,
                step.decodes,
                longest=step.longest,
                window=window,
                tile=self.tile,
            )
        if len(step.tiles[0]):
            prefill_attention(out_TAD, q_TAD, pool, layer, step.rows, step.tiles, window=window, tile=self.tile)
        return out_TAD

    def finish(self) -> None:
        wait_for(self.step.token_ids_T.device)
