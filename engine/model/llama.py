"""Decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged pool.

One forward, numbered:
1. the rows' tokens are laid end to end, and the step's index tensors are made once;
2. per layer: norm, joined q/k/v product, q/k norm (Qwen3), rotation, K and V into the pool, attention, output product;
   norm, joined gate/up product, SwiGLU, down product;
3. last norm and vocabulary product for the rows that want logits.

Shapes by suffix: T tokens of the step, E hidden size, F intermediate size, V vocabulary, A query heads, K kv heads,
N = A + 2 K, D head_dim, L rows that want logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.layout import KVLayout
from engine.model.attention import PagedKV, StepIndex, attend, plan_step, write_kv
from engine.model.base import ForwardRow, OnLogits, check_tokens, ignore_logits, scored_pieces
from engine.model.config import ModelConfig
from engine.model.linear import Linear
from engine.model.quantise import HEAD_BITS, rounded
from engine.model.rope import Rope, rotate
from engine.model.weights import Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qk_norm`: [A + K, D], each head's own weight, or None."""

    attention_norm_E: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A decoder with its weights in memory; implements `base.Model`."""

    def __init__(self, config: ModelConfig, weights: Weights, block_size: int, fingerprint: bytes) -> None:
        """Copies what it needs out of `weights`. Raises ModelError, or ConfigError for an impossible layout."""
        attention = config.attention
        self.layout = KVLayout(config.layers, attention.kv_heads, attention.head_dim, block_size, weights.dtype_name)
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.eos_ids = config.eos_ids
        self.fingerprint = fingerprint
        self._config = config
        self._rope = Rope(config.rope, attention.head_dim)
        self._embedding_VE = weights.take("model.embed_tokens.weight")
        self._layers = [_load_layer(config, weights, index) for index in range(config.layers)]
        self._norm_E = weights.take("model.norm.weight")
        head_VE = self._embedding_VE if config.tied_embeddings else weights.take("lm_head.weight")
        self._head = Linear([rounded(head_VE, HEAD_BITS[weights.quantization])])
        self._kv: PagedKV | None = None

    def bind(self, pool: NDArray[np.uint8]) -> None:
        """Use `pool`, uint8 [num_blocks, block_bytes], for KV from now on. Raises ModelError when it does not fit."""
        self._kv = PagedKV(pool, self.layout)

    @torch.inference_mode()
    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        """One forward for all rows. Returns logits float32 [L, V] of the rows with `logits`, in row order.

        Raises ModelError for a row that cannot be run; nothing has been written then.
        """
        if self._kv is None:
            raise ModelError("the model has no pool yet: bind one first")
        if not rows:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        check_tokens(rows, self.vocab_size, self.max_context)
        step = plan_step(rows, self._kv, self._config.attention.heads, self._config.attention.window)
        token_ids = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        # The residual stream stays in float32 whatever the weights are: rounding it thirty times over is most of what
        # a 16-bit forward loses, and at [T, E] it costs next to nothing.
        x_TE = F.embedding(token_ids, self._embedding_VE).float()
        angles = self._rope.angles(step.positions)
        for index, layer in enumerate(self._layers):
            x_TE += self._attention(self._kv, index, layer, x_TE, step, angles)
            x_TE += self._mlp(layer, x_TE)
        for tokens in scored_pieces(rows):
            on_logits(self._logits(x_TE, torch.from_numpy(tokens)))
        if not len(step.last_tokens):
            return np.empty((0, self.vocab_size), dtype=np.float32)
        return self._logits(x_TE, step.last_tokens)

    def _logits(self, x_TE: torch.Tensor, tokens_L: torch.Tensor) -> NDArray[np.float32]:
        x_LE = self._norm(x_TE.index_select(0, tokens_L), self._norm_E)
        logits: NDArray[np.float32] = self._head(x_LE).float().numpy()
        return logits

    def _attention(
        self,
        kv: PagedKV,
        index: int,
        layer: _Layer,
        x_TE: torch.Tensor,
        step: StepIndex,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads, head_dim = self._config.attention.heads, self.layout.head_dim
        qkv_TND = layer.qkv(self._norm(x_TE, layer.attention_norm_E)).view(len(x_TE), -1, head_dim)
        qk, v_TKD = qkv_TND[:, : -self.layout.kv_heads], qkv_TND[:, -self.layout.kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (head_dim,), None, self._config.rms_eps) * layer.qk_norm
        rotated = rotate(qk, angles)
        write_kv(kv, index, torch.stack((rotated[:, heads:], v_TKD), dim=1), step)
        return layer.output(attend(kv, index, rotated[:, :heads], step).reshape(len(x_TE), -1))

    def _mlp(self, layer: _Layer, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = layer.gate_up(self._norm(x_TE, layer.mlp_norm_E)).chunk(2, dim=-1)
        return layer.down(F.silu(gate_TF) * up_TF)

    def _norm(self, x: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) of the float32 stream, in the dtype of the weights."""
        return (F.rms_norm(x, weight_E.shape, None, self._config.rms_eps)).to(weight_E.dtype) * weight_E


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}."

    def linear(names: Sequence[str], *, bias: bool) -> Linear:
        return Linear(
            [weights.take_product(f"{prefix}{name}.weight") for name in names],
            [weights.take(f"{prefix}{name}.bias") for name in names] if bias else (),
        )

    attention = config.attention
    qk_norm = None
    if attention.qk_norm:
        q_norm_D, k_norm_D = (weights.take(f"{prefix}self_attn.{name}_norm.weight") for name in ("q", "k"))
        qk_norm = torch.cat((q_norm_D.expand(attention.heads, -1), k_norm_D.expand(attention.kv_heads, -1)))
    return _Layer(
        attention_norm_E=weights.take(prefix + "input_layernorm.weight"),
        qkv=linear(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], bias=attention.qkv_bias),
        qk_norm=qk_norm,
        output=linear(["self_attn.o_proj"], bias=attention.output_bias),
        mlp_norm_E=weights.take(prefix + "post_attention_layernorm.weight"),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], bias=config.mlp_bias),
        down=linear(["mlp.down_proj"], bias=config.mlp_bias),
    )
