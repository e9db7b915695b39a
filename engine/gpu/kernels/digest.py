"""Block digests (cluster/core/digest.py), alone or of the very words that a copy stores: exact, wrapping, 64 bit.

A program takes a piece of one unit (a kv head of a block). Wrapping sums may be added in any order, so the pieces' sums
are added afterwards. Shapes: U units, P pieces of a unit, W words of a piece.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from cluster.core.digest import WORD, weights

_PIECE = 2048  # words of one program
_C = tl.constexpr(0x9E3779B97F4A7C15)
_K = tl.constexpr(0xBF58476D1CE4E5B9)


@triton.jit
def _digest(sums, target, source, targets, sources, weight, words, COPIES: tl.constexpr, W: tl.constexpr):
    """Piece `program_id(1)` of unit `program_id(0)`, whose words start at `sources` of `source`, in words."""
    unit, piece = tl.program_id(0), tl.program_id(1)
    i = piece * W + tl.arange(0, W)
    real = i < words
    word_W = tl.load(source + tl.load(sources + unit) + i, mask=real, other=0)
    if COPIES:
        tl.store(target + tl.load(targets + unit) + i, word_W, mask=real)
    y_W = (word_W.to(tl.uint64, bitcast=True) ^ _C) * _K
    y_W ^= y_W >> 32
    y_W *= tl.load(weight + i, mask=real, other=0).to(tl.uint64, bitcast=True)  # 0 beyond the unit
    tl.store(sums + unit.to(tl.int64) * tl.num_programs(1) + piece, tl.sum(y_W.to(tl.int64, bitcast=True), 0))


def digest_blocks(blocks: torch.Tensor, which: torch.Tensor, heads: int) -> torch.Tensor:
    """Digests int64 [len(which), heads] of the blocks `which` (int64) of `blocks`, uint8 [num_blocks, block_bytes]."""
    return _run(blocks, which, blocks, which, heads, copies=False)


def copy_blocks(
    target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor, heads: int
) -> torch.Tensor:
    """Copy block `sources[i]` of `source` to block `targets[i]` of `target`; digests int64 [len, heads] of the copies.

    Each word is loaded once: what is digested is what was stored, whatever becomes of the source meanwhile.
    Both are uint8 [any, block_bytes], contiguous, `targets` and `sources` int64.
    """
    return _run(target, targets, source, sources, heads, copies=True)


def _run(
    target: torch.Tensor,
    targets: torch.Tensor,
    source: torch.Tensor,
    sources: torch.Tensor,
    heads: int,
    *,
    copies: bool,
) -> torch.Tensor:
    block_words = source.shape[1] // WORD
    words = block_words // heads
    head_words = torch.arange(heads, device=source.device) * words
    pieces = -(-words // _PIECE)
    sums = torch.empty((len(sources) * heads, pieces), dtype=torch.int64, device=source.device)
    _digest[len(sums), pieces](
        sums,
        target.view(torch.int64),
        source.view(torch.int64),
        (targets[:, None] * block_words + head_words).reshape(-1),
        (sources[:, None] * block_words + head_words).reshape(-1),
        _weights(words, source.device),
        words,
        COPIES=copies,
        W=min(_PIECE, triton.next_power_of_2(words)),
    )
    return sums.sum(dim=1).view(-1, heads)


@lru_cache(maxsize=8)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """w[0..words) as int64: 8 bytes a word from the cache beat three more 64-bit products."""
    return torch.from_numpy(weights(words).view("int64").copy()).to(device)
