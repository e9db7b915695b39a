"""What a forward does between its products, behind one interface, and the plain torch that says what is right.

`Operators` belongs to a model, `Forward` to one step of it. Everything is where the model's device is.
Shapes: T tokens of the step, L rows that want logits, E hidden size, A query heads, K kv heads, N = A + 2 K, D
head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.layout import KVLayout
from engine.model.attention import PagedKV, StepIndex, attend, plan_step, write_kv
from engine.model.base import ForwardRow
from engine.model.config import ModelConfig
from engine.model.rope import Rope, rotate


class Forward(Protocol):
    """One step's rows, ready for every layer."""

    @property
    def token_ids_T(self) -> torch.Tensor:
        """The rows' tokens, end to end."""

    @property
    def last_tokens_L(self) -> torch.Tensor:
        """Which of them are the last of a row that wants logits."""

    def add_norm(self, x_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor) -> torch.Tensor:
        """Add `delta_TE` to the float32 stream `x_TE`, in place; returns RMSNorm (Zhang and Sennrich 2019) of the sum.

        In the dtype of the weight, rounded to it before the weight is applied.
        """

    def attend(self, layer: int, qkv_TND: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Norm of q and k where there is one ([A + K, D]), rotation, K and V into the pool, causal attention.

        Returns [T, A, D].
        """

    def finish(self) -> None:
        """Wait until everything of this step has been written: its blocks may be offered then (DESIGN §7)."""


class Operators(Protocol):
    """Makes Forwards."""

    def start(self, kv: PagedKV, rows: Sequence[ForwardRow]) -> Forward:
        """For rows whose KV is in `kv`. Raises ModelError for one whose tokens and table do not fit each other or it.

        Nothing is written then.
        """


class TorchOperators:
    """Plain torch, on any device: the reference of all others."""

    def __init__(self, config: ModelConfig, layout: KVLayout, device: torch.device) -> None:
        self._config = config
        self._rope = Rope(config.rope, config.attention.head_dim, device)

    def start(self, kv: PagedKV, rows: Sequence[ForwardRow]) -> Forward:
        """See Operators."""
        step = plan_step(rows, kv, self._config.attention.heads, self._config.attention.window)
        token_ids = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        return _TorchForward(
            token_ids.to(step.positions.device), kv, step, self._rope.angles(step.positions), self._config
        )


@dataclass(frozen=True, slots=True)
class _TorchForward:
    """See Forward."""

    token_ids_T: torch.Tensor
    kv: PagedKV
    step: StepIndex
    angles: tuple[torch.Tensor, torch.Tensor]
    config: ModelConfig

    @property
    def last_tokens_L(self) -> torch.Tensor:
        return self.step.last_tokens

    def add_norm(self, x_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor) -> torch.Tensor:
        if delta_TE is not None:
            x_TE += delta_TE
        return F.rms_norm(x_TE, weight_E.shape, None, self.config.rms_eps).to(weight_E.dtype) * weight_E

    def attend(self, layer: int, qkv_TND: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        heads, kv_heads = self.config.attention.heads, self.config.attention.kv_heads
        qk, v_TKD = qkv_TND[:, :-kv_heads], qkv_TND[:, -kv_heads:]
        if qk_norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.config.rms_eps) * qk_norm
        rotated = rotate(qk, self.angles)
        write_kv(self.kv, layer, torch.stack((rotated[:, heads:], v_TKD), dim=1), self.step)
        return attend(self.kv, layer, rotated[:, :heads], self.step)

    def finish(self) -> None:
        wait_for(self.token_ids_T.device)


def wait_for(device: torch.device) -> None:
    """Wait for what this thread has asked of a device; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
