"""KV in int8: what a vector becomes, where its scale lies, and what one KV dtype becomes in another."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cluster.core.digest import WORD
from cluster.core.errors import ConfigError
from engine.layout import KVLayout
from engine.model.kv_codec import close_pages, convert, open_pages, quantise

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="int8")
FLOATS = dataclasses.replace(LAYOUT, dtype="float32")


def values(pages: int, seed: int = 0) -> torch.Tensor:
    """[pages, P, D], of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pages, LAYOUT.block_size, LAYOUT.head_dim)
    size = torch.exp(4 * torch.randn((pages, LAYOUT.block_size, 1), generator=generator))
    return torch.randn(shape, generator=generator) * size


def blocks_of(layout: KVLayout, x_MPD: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return close_pages(x_MPD, layout).numpy().reshape(-1, layout.block_bytes)


def test_a_block_holds_its_scales() -> None:
    assert (LAYOUT.item_bytes, LAYOUT.scale_bytes, LAYOUT.page_bytes) == (1, 4, 4 * (8 + 4))
    assert LAYOUT.block_bytes == 2 * 3 * 2 * LAYOUT.page_bytes == 4 * LAYOUT.token_bytes
    assert LAYOUT.unit_bytes % WORD == 0
    assert (FLOATS.scale_bytes, FLOATS.page_bytes) == (0, 4 * 8 * 4)
    real = KVLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="int8")
    assert real.block_bytes / dataclasses.replace(real, dtype="bfloat16").block_bytes == 68 / 128


def test_what_no_scale_could_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="end within a float32"):
        dataclasses.replace(LAYOUT, block_size=1, head_dim=6)
    with pytest.raises(ValueError, match="no array of values alone"):
        LAYOUT.shape(3)
    assert LAYOUT.difference(FLOATS) == "dtype: int8 here, float32 there"


@given(arrays.arrays(np.float32, (3, 8), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_no_value_moves_by_more_than_half_a_step(x: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    q, scale = quantise(torch.from_numpy(x))
    found, steps = q.double() * scale.double().unsqueeze(-1), scale.double().unsqueeze(-1)
    assert (scale >= 0).all()
    # A step so small that float32 has few of its size left is itself rounded: 127 of them miss by one of the smallest.
    assert ((found - torch.from_numpy(x).double()).abs() <= steps * 0.5001 + 127 * 2.0**-149).all()


def test_what_is_not_finite_is_read_as_no_number() -> None:
    x = torch.ones(3, 4, 8)
    x[0, 1, 2], x[1, 3, 0] = torch.nan, torch.inf
    found = open_pages(close_pages(x, LAYOUT).view(torch.int8), LAYOUT)
    assert torch.isnan(found).all(dim=-1).nonzero().tolist() == [[0, 1], [1, 3]]
    assert torch.isfinite(found).sum() == (3 * 4 - 2) * 8


def test_poison_is_read_as_no_number() -> None:
    page = torch.full((1, LAYOUT.page_bytes), 0xFF, dtype=torch.uint8).view(torch.int8)
    assert torch.isnan(open_pages(page, LAYOUT)).all()


def test_nothing_stays_nothing() -> None:
    assert not open_pages(close_pages(torch.zeros(2, 4, 8), LAYOUT).view(torch.int8), LAYOUT).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_converted_blocks_hold_what_the_source_held(dtype: str) -> None:
    source = dataclasses.replace(LAYOUT, dtype=dtype)
    x = values(5 * 2 * 3 * 2)
    theirs = blocks_of(source, x)
    held = open_pages(close_pages(x, source).view(getattr(torch, dtype)), source)
    np.testing.assert_array_equal(convert(theirs, dtype, LAYOUT), blocks_of(LAYOUT, held))
    np.testing.assert_array_equal(convert(theirs, dtype, FLOATS), blocks_of(FLOATS, held))


def test_int8_becomes_what_is_read_of_it() -> None:
    x = values(5 * 2 * 3 * 2)
    opened = open_pages(close_pages(x, LAYOUT).view(torch.int8), LAYOUT)
    found = convert(blocks_of(LAYOUT, x), "int8", FLOATS).view(np.float32).reshape(opened.shape)
    np.testing.assert_array_equal(found, opened.numpy())
