"""The noise is a pure function with fixed values: changing them changes every seeded answer."""

import numpy as np
import pytest

from engine.noise import GOLDEN, exponential, mix, noise_bits, noise_bits_at, noise_key

GOLDEN_BITS = {
    (0, 0, 0): (0x238275BC38FCBE91, [0xAAC80268, 0x2130748A, 0x79CE5090, 0x0CC78FB9, 0xFBA6B4AC]),
    (1, 0, 0): (0xB18A02F46D8D86C3, [0xD9EE4956, 0xE28195DD, 0x9A2F4459, 0x6735FA33, 0x933B8AAD]),
    (0, 1, 0): (0x44E5B98100C67FB0, [0x87984B37, 0xD1C02706, 0x40FDEC19, 0x40D6B91D, 0x149CA6CE]),
    (0, 0, 1): (0x2F32A78496C67C60, [0x73D37C42, 0xD9EEF7F0, 0xB6F7C951, 0x2FCBDE10, 0xAB4C890E]),
    (2**64 - 1, 7, 131071): (0x68522AAB358F395D, [0x171A3766, 0x64D90D56, 0x5729F36A, 0x4C0F4504, 0xAC2285E2]),
}


@pytest.mark.parametrize("counter", GOLDEN_BITS)
def test_golden_values(counter: tuple[int, int, int]) -> None:
    key, bits = GOLDEN_BITS[counter]
    assert noise_key(*counter) == key
    assert noise_bits(key, 5).tolist() == bits


def test_mix_is_splitmix64() -> None:
    # The first outputs from seed 0 as published with the reference implementation.
    assert [mix(GOLDEN * i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("vocab", [1, 2, 1023, 1024])
def test_bits_do_not_depend_on_how_many_are_asked_for(vocab: int) -> None:
    key = noise_key(3, 1, 4)
    every = noise_bits(key, vocab)
    assert every.shape == (vocab,)
    assert (every == noise_bits(key, 5000)[:vocab]).all()
    some = np.arange(vocab, dtype=np.int64)[::-3]
    assert (noise_bits_at(key, some) == every[some]).all()
    by_hand = [mix(key + (t // 2 + 1) * GOLDEN) >> 32 * (t % 2) & 0xFFFFFFFF for t in range(vocab)]
    assert every.tolist() == by_hand


def test_exponential_is_finite_positive_and_has_its_mean() -> None:
    ends = exponential(np.array([0, 2**32 - 1], np.uint32))
    assert 0 < ends[0] < 1e-9
    assert 22 < ends[1] < 24
    draws = exponential(noise_bits(noise_key(1, 2, 3), 200_000))
    assert abs(draws.mean() - 1) < 0.01
    assert abs(draws.var() - 1) < 0.03
