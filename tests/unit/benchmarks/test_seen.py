"""What it costs to be seen: ratios within rounds, the median of them, and what is made of it."""

import pytest

from benchmarks.seen import METRICS, SETUPS, UNSEEN, Options, Rounds, costs, markdown

OPTIONS = Options("tracer", "at_once", 3, 10)
LOOP = 0.00001, 0.00003  # seconds a request


def rounds(*shares: float) -> Rounds:
    """Metrics cost so much more than nothing, in rounds in which the machine is of different speeds."""
    slow = (1.0, 3.0, 0.5)
    return [
        {name: {"cpu_ms": slow[at] * (1 if name == UNSEEN else 1 + share), "req_s": 100.0} for name in SETUPS}
        for at, share in enumerate(shares)
    ]


def test_a_ratio_is_taken_within_its_round() -> None:
    assert costs(rounds(0.01, 0.03, 0.02), METRICS) == pytest.approx([0.01, 0.03, 0.02])


@pytest.mark.parametrize(("shares", "said"), [((0.01, 0.5, 0.012), "1.2 %"), ((0.01, 0.031, 0.05), "3.1 %")])
def test_the_page_says_whether_the_aim_is_held_by_the_median(shares: tuple[float, ...], said: str) -> None:
    text = markdown(rounds(*shares), LOOP, OPTIONS, {"date": "today"})
    held = "held" if said < "2" else "NOT held"
    assert f"Metrics cost {said} of the router's processor time: under 2 % is {held}." in text
    assert text.count("| unseen |") == 2, "its own row, and what metrics are beside"
    assert "In a loop: metrics 10.0 us a request, 1.0 %; with the dashboard 30.0 us a request, 3.0 %." in text
