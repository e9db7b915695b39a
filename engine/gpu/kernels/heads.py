"""What stands between a layer's products: residual sum and norm; rotation and the write of K and V into the pool.

Shapes: T tokens of the step, E hidden size, A query heads, K kv heads, N = A + 2 K, D head_dim.
"""

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.attention import PoolView

_VECTORS = 8  # of one program: 8 kB of float32 at a head_dim of 256


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
           A: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
           BLOCK_D: tl.constexpr):  # fmt: skip
    """V vectors of one token: a query goes to `q`, K and V into the pool; no slot (-1), no write."""
    token = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1) * V + tl.arange(0, V)
    d = tl.arange(0, BLOCK_D)
    real_VD = (vector < A + 2 * K)[:, None] & (d < D)[None, :]
    source_V = qkv + (token * (A + 2 * K) + vector) * D
    swapped = (d + D // 2) % D
    plain_VD = tl.load(source_V[:, None] + d[None, :], mask=real_VD, other=0.0)
    dtype: tl.constexpr = plain_VD.dtype
    own_VD = plain_VD.to(tl.float32)
    other_VD = tl.load(source_V[:, None] + swapped[None, :], mask=real_VD, other=0.0).to(tl.float32)
    if NORMS:
        scale_V = tl.rsqrt(tl.sum(own_VD * own_VD, 1) / D + eps)[:, None]
        weight_V = norm + vector * D
        normed_VD = (vector < A + K)[:, None] & real_VD
        own_VD = _weighted(own_VD * scale_V, weight_V[:, None] + d[None, :], normed_VD, dtype)
        other_VD = _weighted(other_VD * scale_V, weight_V[:, None] + swapped[None, :], normed_VD, dtype)
    cos_D = tl.load(cos + token * D + d, mask=d < D, other=0.0)
    sin_D = tl.load(sin + token * D + d, mask=d < D, other=0.0)  # the first half is negated already
    rotated_VD = (own_VD * cos_D[None, :] + other_VD * sin_D[None, :]).to(dtype)
    is_query = vector < A
    tl.store(q + ((token * A + vector) * D)[:, None] + d[None, :], rotated_VD, mask=is_query[:, None] & real_VD)
    slot = tl.load(slots + token)
    is_value = vector >= A + K
    head = tl.where(is_value, vector - A - K, vector - A)
    page_place = tl.where(is_value, PAGE, 0) + slot % PAGE
    place_V = slot // PAGE * block_stride + head * head_stride + page_place * D
    written_VD = (~is_query & (slot >= 0))[:, None] & real_VD
    kept_VD = tl.where(is_value[:, None], plain_VD, rotated_VD)
    tl.store(pool + place_V[:, None] + d[None, :], kept_VD, mask=written_VD)


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
    together = min(_VECTORS, triton.next_power_of_2(vectors))
    q_TAD = qkv_TND.new_empty((tokens, heads, head_dim))
    norm = qkv_TND if qk_norm is None else qk_norm
    _heads[tokens, -(-vectors // together)](
        q_TAD, pool.elements[pool.layer_offset(layer) :], qkv_TND, norm, *angles, slots_T, eps, pool.block_stride,
        pool.head_stride, NORMS=qk_norm is not None, A=heads, K=layout.kv_heads, PAGE=layout.block_size, D=head_dim,
        V=together, BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return q_TAD
