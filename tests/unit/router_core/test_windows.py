"""The last minutes in slots: sums and histograms that forget, against a plain list of what came when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.windows import LATENCY_S, RollingHistogram, RollingSums, spread

SLOT_S, SLOTS = 5.0, 6
STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 9)), max_size=60)
VALUES = st.lists(st.floats(0.0001, 200), min_size=1, max_size=200)


@given(STEPS)
def test_sums_are_those_of_what_came_in_the_window(steps: list[tuple[float, int]]) -> None:
    sums, came, now = RollingSums(2, SLOT_S, SLOTS), [], 0.0
    for pause, value in steps:
        now += pause
        sums.add(now, value, 1)
        came.append((int(now // SLOT_S), value))
        oldest = int(now // SLOT_S) - SLOTS + 1
        inside = [value for slot, value in came if slot >= oldest]
        assert sums.totals(now) == [sum(inside), len(inside)]
        assert [row[1] for row in sums.series(now)] == [
            sum(slot == at for slot, _ in came) for at in range(oldest, oldest + SLOTS)
        ]


@given(st.floats(0, 1e6), st.floats(0, 1e4))
def test_nothing_is_left_when_the_window_has_passed(began: float, later: float) -> None:
    sums = RollingSums(1, SLOT_S, SLOTS)
    sums.add(began, 1)
    assert sums.totals(began + SLOT_S * (SLOTS + 1) + later) == [0]


def test_time_that_goes_back_a_little_counts_as_now() -> None:
    sums = RollingSums(1, SLOT_S, SLOTS)
    sums.add(100.0, 1)
    sums.add(94.0, 1)
    assert sums.totals(100.0) == [2]
    assert sums.series(100.0)[-1] == [2]


@given(VALUES, st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_right_to_a_bucket(values: list[float], share: float) -> None:
    histogram = RollingHistogram(LATENCY_S, SLOT_S, SLOTS)
    for value in values:
        histogram.add(1.0, value)
    (series,), (guess,) = histogram.quantiles(1.0, [share])
    true = sorted(values)[max(0, -(-round(share * len(values) * 1e9) // 10**9) - 1)]
    assert guess is not None
    assert series[-1] == guess
    assert series[:-1] == [None] * (SLOTS - 1)
    if true <= LATENCY_S[0]:
        assert 0 <= guess <= LATENCY_S[0]
    else:
        assert min(true, LATENCY_S[-1]) / 1.2501 <= guess <= true * 1.2501
    assert sum(histogram.counts(1.0)) == len(values)


def test_quantiles_rise_with_their_share_and_are_none_where_nothing_came() -> None:
    histogram = RollingHistogram(LATENCY_S, SLOT_S, SLOTS)
    assert histogram.quantiles(7.0, [0.5]) == ([[None] * SLOTS], [None])
    for at in range(100):
        histogram.add(at * 0.2, 0.001 * (at + 1))
    _, (low, high) = histogram.quantiles(20.0, [0.5, 0.95])
    assert low is not None
    assert high is not None
    assert low < high


def test_bounds_reach_the_most_and_rise_evenly() -> None:
    bounds = spread(1, 100, 10)
    assert bounds == pytest.approx((1, 10, 100))
    assert LATENCY_S[-1] >= 120
    assert len(LATENCY_S) < 64
