"""The digest that proves a block's bytes (DESIGN §4, "Digest").

One unit is one kv head of one full block: contiguous, a multiple of 8 bytes. Over its little-endian 64-bit words x[i]:
    y = (x[i] ^ C) * K;  y ^= y >> 32;  D += y * w[i]        (all wrapping, w[i] = i-th splitmix64 output | 1)
A block's digest is the list over its heads, 8 bytes each. It proves transport and rest, not meaning: that KV came from
these tokens is what the block key says.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_C = np.uint64(0x9E3779B97F4A7C15)
_K = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(32)
WORD = 8


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014) for states that were already incremented."""
    z = state.copy()
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=8)
def weights(words: int) -> NDArray[np.uint64]:
    """w[0..words): the first outputs of splitmix64 from seed 0, made odd."""
    state = np.arange(1, words + 1, dtype=np.uint64) * _C
    result = splitmix64(state) | np.uint64(1)
    result.setflags(write=False)
    return result


def digest_units(units: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Digests of `units`, shape [n, unit_bytes] -> [n]. Raises ValueError when unit_bytes is not a multiple of 8."""
    if units.ndim != 2 or units.shape[1] % WORD:
        raise ValueError(f"digest units must be [n, multiple of {WORD} bytes], got {units.shape}")
    words = np.ascontiguousarray(units).view("<u8")
    mixed = words ^ _C
    mixed *= _K
    mixed ^= mixed >> _SHIFT
    mixed *= weights(words.shape[1])
    digests: NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64)
    return digests


def digest_block(block: NDArray[np.uint8], heads: int) -> bytes:
    """The digest of one block, shape [block_bytes]: 8 little-endian bytes per kv head."""
    return digest_units(block.reshape(heads, -1)).astype("<u8").tobytes()
