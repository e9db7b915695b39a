"""Ranges of one read: the same bytes in the same order, in as few pieces as memory allows (FAULTS P07)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.ranges import merge_ranges

SIZE = 64


@pytest.mark.parametrize(
    ("addresses", "ranges"),
    [
        ([], []),
        ([0, 64, 128], [(0, 192)]),
        ([0, 128], [(0, 64), (128, 64)]),
        ([64, 0], [(64, 64), (0, 64)]),
        ([0, 65], [(0, 64), (65, 64)]),
        ([256, 320, 0, 64, 192], [(256, 128), (0, 128), (192, 64)]),
    ],
)
def test_only_neighbours_in_memory_and_in_order_are_joined(addresses: list[int], ranges: list[tuple[int, int]]) -> None:
    assert merge_ranges(addresses, SIZE) == ranges


@given(st.lists(st.integers(0, 12), unique=True))
def test_every_byte_is_read_once_and_in_order(blocks: list[int]) -> None:
    wanted = [block * SIZE + byte for block in blocks for byte in range(SIZE)]
    merged = merge_ranges([block * SIZE for block in blocks], SIZE)
    assert [address + byte for address, size in merged for byte in range(size)] == wanted
