"""Decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged pool.

One forward, numbered:
1. the rows' tokens are laid end to end, and the step's index tensors are made once;
2. per layer: norm, joined q/k/v product, q/k norm (Qwen3), rotation, K and V into the pool, attention, output product;
   norm, joined gate/up product, SwiGLU, down product;
3. last norm and vocabulary product for the rows that want logits.
The products are here; what is between them is done by Operators: plain torch, or kernels of a GPU.

Shapes by suffix: T tokens of the step, E hidden size, F intermediate size, V vocabulary, A query heads, K kv heads,
N = A + 2 K, D head_dim, L rows that want logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from cluster.core.errors import IntegrityError, ModelError
from engine.layout import KVLayout
from engine.model.attention import PagedKV, PoolBytes
from engine.model.base import ForwardRow, OnLogits, check_tokens, ignore_logits, scored_pieces
from engine.model.config import ModelConfig
from engine.model.dtypes import TORCH_DTYPES
from engine.model.linear import Linear
from engine.model.operators import Forward, Operators, TorchOperators
from engine.model.quantise import HEAD_BITS, rounded
from engine.model.weights import Weights

MakeOperators = Callable[[ModelConfig, KVLayout, torch.device], Operators]


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

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        block_size: int,
        fingerprint: bytes,
        make_operators: MakeOperators = TorchOperators,
        *,
        kv_dtype: str | None = None,
    ) -> None:
        """Copies what it needs out of `weights`. Raises ModelError, or ConfigError for an impossible layout.

        `kv_dtype`: what KV is stored in; None: the dtype of the weights.
        """
        self.layout = config.kv_layout(block_size, kv_dtype or weights.dtype_name)
        self._dtype = TORCH_DTYPES[weights.dtype_name]
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.eos_ids = config.eos_ids
        self.fingerprint = fingerprint
        self.device = str(weights.device)
        self._operators = make_operators(config, self.layout, weights.device)
        self._kv: PagedKV | None = None
        self._embedding_VE = weights.take("model.embed_tokens.weight")
        self._layers = [_load_layer(config, weights, index) for index in range(config.layers)]
        self._norm_E = weights.take("model.norm.weight")
        head_VE = self._embedding_VE if config.tied_embeddings else weights.take("lm_head.weight")
        self._head = Linear([rounded(head_VE, HEAD_BITS[weights.quantization])])

    def bind(self, pool: PoolBytes) -> None:
        """Use `pool`, uint8 [num_blocks, block_bytes], for KV from now on. Raises ModelError when it does not fit."""
        self._kv = PagedKV(pool, self.layout, self._dtype)

    @torch.inference_mode()
    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        """One forward for all rows. Returns logits float32 [L, V] of the rows with `logits`, in row order.

        Raises ModelError for a row that cannot be run; nothing has been written then. IntegrityError: the GPU is gone,
        which is no row's fault and ends the process.
        """
        if not rows:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        check_tokens(rows, self.vocab_size, self.max_context)
        try:
            return self._run(rows, on_logits)
        except torch.AcceleratorError as error:  # whatever is asked of this process's GPU from now on fails like this
            raise IntegrityError(f"{self.device} failed: {error}") from error

    def _run(self, rows: list[ForwardRow], on_logits: OnLogits) -> NDArray[np.float32]:
        if self._kv is None:
            raise ModelError("the model has no pool yet: bind one first")
        forward = self._operators.start(self._kv, rows)
        # The residual stream stays in float32 whatever the weights are: rounding it thirty times over is most of what
        # a 16-bit forward loses, and at [T, E] it costs next to nothing.
        x_TE = F.embedding(forward.token_ids_T, self._embedding_VE).float()
        delta_TE = None  # what the stream is still owed: the next norm adds it in passing
        for index, layer in enumerate(self._layers):
            qkv_TO = layer.qkv(forward.add_norm(x_TE, delta_TE, layer.attention_norm_E))
            attended_TAD = forward.attend(index, qkv_TO.view(len(x_TE), -1, self.layout.head_dim), layer.qk_norm)
            delta_TE = layer.output(attended_TAD.reshape(len(x_TE), -1))
            gate_TF, up_TF = layer.gate_up(forward.add_norm(x_TE, delta_TE, layer.mlp_norm_E)).chunk(2, dim=-1)
            delta_TE = layer.down(F.silu(gate_TF) * up_TF)
        if delta_TE is not None:
            x_TE += delta_TE
        for tokens in scored_pieces(rows):
            on_logits(self._logits(forward, x_TE, torch.from_numpy(tokens).to(x_TE.device)))
        if not len(forward.last_tokens_L):
            forward.finish()
            return np.empty((0, self.vocab_size), dtype=np.float32)
        return self._logits(forward, x_TE, forward.last_tokens_L)

    def _logits(self, forward: Forward, x_TE: torch.Tensor, tokens_L: torch.Tensor) -> NDArray[np.float32]:
        x_LE = forward.add_norm(x_TE.index_select(0, tokens_L), None, self._norm_E)
        logits: NDArray[np.float32] = self._head(x_LE).float().cpu().numpy()
        return logits


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
