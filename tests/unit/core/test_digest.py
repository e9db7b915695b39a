"""The digest against the golden values of the design and against a word-by-word reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.digest import digest_block, digest_units

MASK = (1 << 64) - 1


def reference(data: bytes) -> int:
    """The formula, one word at a time, in Python's unbounded integers."""
    total, state = 0, 0
    for i in range(0, len(data), 8):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        w = (z ^ (z >> 31)) | 1
        y = ((int.from_bytes(data[i : i + 8], "little") ^ 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) & MASK
        y ^= y >> 32
        total = (total + y * w) & MASK
    return total


@pytest.mark.parametrize(
    ("data", "golden"),
    [
        (bytes(64), 0xA8A3409853CDFC24),
        (bytes(range(256)), 0x728E6EE6C422A453),
        (b"\xff" * 64, 0x446A36796BCF2D50),
    ],
)
def test_golden_values(data: bytes, golden: int) -> None:
    units = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
    assert int(digest_units(units)[0]) == golden
    assert reference(data) == golden


@given(st.binary(min_size=8, max_size=400).map(lambda b: b[: len(b) // 8 * 8]))
def test_equals_the_reference(data: bytes) -> None:
    assert int(digest_units(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0]) == reference(data)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 511))
def test_one_flipped_bit_changes_it(data: bytes, bit: int) -> None:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest_block(np.frombuffer(data, np.uint8), 1) != digest_block(np.frombuffer(bytes(flipped), np.uint8), 1)


def test_swapped_heads_change_it() -> None:
    block = np.arange(128, dtype=np.uint8)
    swapped = np.concatenate([block[64:], block[:64]])
    assert digest_block(block, 2) != digest_block(swapped, 2)
    assert digest_block(block, 2) == digest_block(block[:64], 1) + digest_block(block[64:], 1)


def test_refuses_a_length_that_is_no_multiple_of_eight() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        digest_units(np.zeros((1, 12), np.uint8))
