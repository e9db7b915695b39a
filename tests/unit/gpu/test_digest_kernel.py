"""Copies and digests in Triton's interpreter: the exact numbers of cluster/core/digest.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.digest import digest_block
from engine.gpu.kernels.digest import copy_blocks, digest_blocks


@pytest.mark.parametrize(
    ("data", "golden"),
    [
        (bytes(64), 0xA8A3409853CDFC24),
        (bytes(range(256)), 0x728E6EE6C422A453),
        (b"\xff" * 64, 0x446A36796BCF2D50),
    ],
    ids=["zeros", "rising", "ones"],
)
def test_golden_digests(data: bytes, golden: int) -> None:
    block = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]
    assert int(digest_blocks(block, torch.tensor([0]), 1)) % 2**64 == golden


@settings(max_examples=10)
@given(heads=st.integers(1, 4), words=st.one_of(st.integers(1, 40), st.integers(2040, 4100)), data=st.data())
def test_copies_are_whole_and_their_digests_are_those_of_the_numpy_code(
    heads: int, words: int, data: st.DataObject
) -> None:
    size = heads * words * 8
    rng = np.random.default_rng(words)
    source = torch.from_numpy(rng.integers(0, 256, (4, size), np.uint8))
    before = torch.from_numpy(rng.integers(0, 256, (6, size), np.uint8))
    sources = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3), label="sources")
    targets = data.draw(st.permutations(range(6)), label="targets")[: len(sources)]
    target = before.clone()
    copies = copy_blocks(target, torch.tensor(targets), source, torch.tensor(sources), heads)
    expected = before.clone()
    expected[targets] = source[sources]
    assert torch.equal(target, expected)
    for found in (copies, digest_blocks(target, torch.tensor(targets), heads)):
        assert [row.numpy().tobytes() for row in found] == [digest_block(source[s].numpy(), heads) for s in sources]
