"""Counter-based noise: the random number of a draw depends on what is drawn, never on who draws it (FAULTS C28, I5).

    key(seed, index, position) = M(M(M(seed + G) ^ index + G) ^ position + G)
    pair(key, t // 2)          = M(key + (t // 2 + 1) * G)              a 64-bit word for two neighbouring tokens
    bits(key, t)               = its low half for even t, its high half for odd t
    v = (bits + 1/2) / 2**32,  E = -log(1 - v)  ~ Exp(1),  g = -log(E)  ~ Gumbel(0, 1)

M is the output function of splitmix64, G its increment (Steele, Lea, Flood 2014); all arithmetic is modulo 2**64.
Thirty-two bits a token distort only the chances of tokens rarer than about 1e-9; one hash for two halves the cost.
There is no state, so a retry, another worker or another batch draws the same token.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cluster.core.digest import splitmix64

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
SCALE = 2.0**-32
_G = np.uint64(GOLDEN)


def mix(state: int) -> int:
    """splitmix64's output function on one Python integer."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def noise_key(seed: int, index: int, position: int) -> int:
    """The key of one draw. `seed` unsigned 64 bit, `index` of the sample, absolute `position` of the drawn token."""
    key = mix(seed + GOLDEN)
    key = mix((key ^ index) + GOLDEN)
    return mix((key ^ position) + GOLDEN)


@lru_cache(maxsize=4)
def _increments(pairs: int) -> NDArray[np.uint64]:
    steps = np.arange(1, pairs + 1, dtype=np.uint64) * _G
    steps.setflags(write=False)
    return steps


def noise_bits(key: int, vocab: int) -> NDArray[np.uint32]:
    """The 32 noise bits of every token id below `vocab`: [vocab]."""
    pairs = splitmix64(_increments((vocab + 1) // 2) + np.uint64(key))
    return pairs.astype("<u8", copy=False).view("<u4")[:vocab]


def noise_bits_at(key: int, tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The same bits for some token ids only: [n] -> [n]."""
    ids = tokens.astype(np.uint64)
    pairs = splitmix64(((ids >> np.uint64(1)) + np.uint64(1)) * _G + np.uint64(key))
    return (pairs >> ((ids & np.uint64(1)) * np.uint64(32))).astype(np.uint32)


def exponential(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """E = -log(1 - v), an Exp(1) variate per entry, exact in float64. Never 0, never infinite."""
    return -np.log1p(-(bits.astype(np.float64) + 0.5) * SCALE)
