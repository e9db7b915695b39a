"""What stands between a layer's products: residual sum and norm; rotation and the write of K and V into the pool.

Shapes: T tokens of the step, E hidden size, A query heads, K kv heads, N = A + 2 K, D head_dim.
"""

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.attention import PoolView


@triton.jit
def _add_norm(out, x, delta, weight, eps, ADDS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    real = e < E
    x_E = tl.load(x + token * E + e, mask=real, other=0.0)
    if ADDS:
        x_E += tl.load(delta + token * E + e, mask=real, other=0.0).to(tl.float32)
        tl.store(x + token * E + e, x_E, mask=real)
    scale = tl.rsqrt(tl.sum(x_E * x_E, 0) / E + eps)
    weight_E = tl.load(weight + e, mask=real, other=0.0)
    rounded_E = (x_E * scale).to(weight_E.dtype).to(tl.float32)  # as the reference rounds, before the weight
    tl.store(out + token * E + e, (rounded_E * weight_E.to(tl.float32)).to(weight_E.dtype), mask=real)


@triton.jit
def _heads(q, pool, qkv, norm, cos, sin, slots, eps, block_stride, head_stride, NORMS: tl.constexpr,
           A: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One vector of one token: a query goes to `q`, K and V into the pool; no slot (-1), no write."""
    token, vector = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    real = d < D
    source = qkv + (token * (A + 2 * K) + vector) * D
    x_D = tl.load(source + d, mask=real, other=0.0)
    dtype = x_D.dtype
    slot = tl.load(slots + token)
    if vector < A + K:
        swapped = (d + D // 2) % D
        own_D = x_D.to(tl.float32)
        other_D = tl.load(source + swapped, mask=real, other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(own_D * own_D, 0) / D + eps)
            own_D = _weighted(own_D * scale, norm + vector * D + d, real, dtype)
            other_D = _weighted(other_D * scale, norm + vector * D + swapped, real, dtype)
        cos_D = tl.load(cos + token * D + d, mask=real, other=0.0)
        sin_D = tl.load(sin + token * D + d, mask=real, other=0.0)  # the first half is negated already
        rotated_D = (own_D * cos_D + other_D * sin_D).to(dtype)
        if vector < A:
            tl.store(q + (token * A + vector) * D + d, rotated_D, mask=real)
        elif slot >= 0:
            place = slot // PAGE * block_stride + (vector - A) * head_stride + slot % PAGE * D
            tl.store(pool + place + d, rotated_D, mask=real)
    elif slot >= 0:
        place = slot // PAGE * block_stride + (vector - A - K) * head_stride + (PAGE + slot % PAGE) * D
        tl.store(pool + place + d, x_D, mask=real)


@triton.jit
def _weighted(x_D, weight, real, dtype: tl.constexpr):
    """x times a weight, rounded to `dtype` before and after, as the reference does."""
    weight_D = tl.load(weight, mask=real, other=0.0).to(tl.float32)
    return (x_D.to(dtype).to(tl.float32) * weight_D).to(dtype).to(tl.float32)


def add_norm(x_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta_TE` to the float32 stream `x_TE`, in place, then RMSNorm (Zhang and Sennrich 2019) of the sum.

    Returns [T, E] in the dtype of the weight, rounded to it before the weight is applied (docs/decisions/0005).
    """
    out_TE = torch.empty_like(x_TE, dtype=weight_E.dtype)
    tokens, width = x_TE.shape
    delta = x_TE if delta_TE is None else delta_TE
    _add_norm[(tokens,)](
        out_TE, x_TE, delta, weight_E, eps, ADDS=delta_TE is not None, E=width, BLOCK_E=triton.next_power_of_2(width)
    )
    return out_TE


def rotate_and_write(
    qkv_TND: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    pool: PoolView,
    layer: int,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Norm of q and k where a model has one (`qk_norm` [A + K, D]), rotation, K and V into the pool.

    `angles`: cos and signed sin, float32 [T, 1, D] (engine/model/rope.py). `slots_T`: int64, block * block_size +
    offset, or -1 for a token that is not written. Returns the rotated queries [T, A, D].
    """
    tokens, vectors, head_dim = qkv_TND.shape
    layout = pool.layout
    heads = vectors - 2 * layout.kv_heads
    q_TAD = qkv_TND.new_empty((tokens, heads, head_dim))
    norm = qkv_TND if qk_norm is None else qk_norm
    _heads[tokens, vectors](
        q_TAD, pool.elements[pool.layer_offset(layer) :], qkv_TND, norm, *angles, slots_T, eps, pool.block_stride,
        pool.head_stride, NORMS=qk_norm is not None, A=heads, K=layout.kv_heads, PAGE=layout.block_size, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return q_TAD
