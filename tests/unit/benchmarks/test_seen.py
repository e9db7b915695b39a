"""What it costs to be seen: ratios within rounds, the median of them, and what is made of it."""

import pytest

from benchmarks.seen import METRICS, SETUPS, UNSEEN, Options, Rounds, costs, markdown

OPTIONS = Options("tracer", "at_once", 3, 10)


def rounds(*shares: float) -> Rounds:
    """Metrics cost so much more than nothing, in rounds in which the machine is of different speeds."""
    slow = (1.0, 3.0, 0.5)
    return [
        {name: {"cpu_ms": slow[at] * (1 if name == UNSEEN else 1 + share), "req_s": 100.0} for name in SETUPS}
        for at, share in enumerate(shares)
    ]


def test_a_ratio_is_taken_within_its_round() -> None:
    assert costs(rounds(0.01, 0.03, 0.02), METRICS) == pytest.approx([0.01, 0.03, 0.02])


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.010, 0.011, 0.012), "+1.1 %, held"),
        ((0.030, 0.031, 0.032), "+3.1 %, NOT held"),
        ((0.010, 0.500, 0.012), "+1.2 %, less than what the machine varies by"),
    ],
)
def test_the_page_says_whether_the_aim_is_held_and_when_nobody_can_tell(shares: tuple[float, ...], said: str) -> None:
    text = markdown(rounds(*shares), (0.00001, 0.00003), OPTIONS, {"date": "today"})
    assert f"Under 2 % for metrics, turn by turn: {said}; in a loop: held." in text
    assert "In a loop: metrics 10.0 us a request, 1.0 %; with the dashboard 30.0 us a request, 3.0 %." in text
    assert text.count("| unseen |") == 2, "its own row, and what metrics are beside"


def test_what_is_dear_in_a_loop_is_not_held() -> None:
    text = markdown(rounds(0.01), (0.000025, 0.00003), OPTIONS, {"date": "today"})
    assert "in a loop: NOT held." in text
