"""Rounding weights: how far a value may move, and what stays exactly as it was."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.model.quantise import GROUP, quantise, rounded

WEIGHTS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 150)), elements=st.floats(-8, 8, width=32))


@given(WEIGHTS)
def test_8_bits_move_a_value_by_half_a_step_at_most(weights: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    weight_OI = torch.from_numpy(weights)
    q_OI, scale_OG = quantise(weight_OI, 8)
    step_OI = scale_OG.repeat_interleave(GROUP, dim=1)[:, : weight_OI.shape[1]]
    assert q_OI.dtype is torch.int8
    assert torch.all((q_OI * step_OI - weight_OI).abs() <= 0.501 * step_OI + 1e-30)


@given(WEIGHTS)
def test_4_bits_lose_no_more_than_plain_rounding(weights: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    weight_OI = torch.from_numpy(weights)
    q_OI, scale_OG = quantise(weight_OI, 4)
    assert -8 <= int(q_OI.min()) <= int(q_OI.max()) <= 7
    error = (rounded(weight_OI, 4) - weight_OI).square().sum()
    largest_O1 = weight_OI.abs().amax(dim=1, keepdim=True)
    # A step is an eighth of the largest value; the end of the other sign, which -8 to 7 does not reach, loses one more.
    assert error <= ((largest_O1 / 8) ** 2).sum() * weight_OI.shape[1] + 1e-6
    assert scale_OG.shape == (len(weight_OI), -(-weight_OI.shape[1] // GROUP))


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    assert torch.equal(rounded(torch.zeros(3, 70), bits), torch.zeros(3, 70))


def test_a_group_keeps_its_largest_value() -> None:
    weight_OI = torch.zeros(1, 2 * GROUP)
    weight_OI[0, 5], weight_OI[0, GROUP + 1] = -3.0, 0.25
    assert torch.equal(rounded(weight_OI, 8), weight_OI)
    assert torch.equal(rounded(weight_OI, 4), weight_OI)


def test_16_bits_are_left_alone() -> None:
    weight_OI = torch.randn(2, 3)
    assert rounded(weight_OI, 16) is weight_OI
