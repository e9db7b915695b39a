"""What it costs to be seen: ratios within rounds, the median of them, and what is made of it."""

import pytest

from benchmarks.seen import METRICS, SETUPS, UNSEEN, Options, Rounds, costs, gains, interval, markdown

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


def test_an_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    few, many = [0.00, 0.01, 0.02, 0.03, 0.04], [0.01 * (at % 5) for at in range(205)]
    low, high = interval(few)
    assert (low, high) == (0.0, 0.04), "of five the median may be any"
    low, high = interval(many)
    assert 0.01 <= low <= 0.02 <= high <= 0.03
    assert interval(few) == interval(few), "the same each time"
    assert interval([0.5]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("shares", "said"),
    [((0.001,) * 9, "resolves"), ((0.03,) * 9, "resolves"), ((-0.1, 0.0, 0.019, 0.05, 0.1), "does not resolve")],
)
def test_the_page_says_whether_rounds_are_enough_to_tell(shares: tuple[float, ...], said: str) -> None:
    assert f" %, {said} it." in markdown(
        [{name: {"cpu_ms": 1.0 + share * (name != UNSEEN), "req_s": 100.0} for name in SETUPS} for share in shares],
        LOOP,
        OPTIONS,
        {"date": "today"},
    )


def test_throughput_stands_beside() -> None:
    made = rounds(0.01, 0.01, 0.01)
    faster = [
        {name: {**of, "req_s": 110.0 if name == METRICS else 100.0} for name, of in each.items()} for each in made
    ]
    assert gains(faster, METRICS) == pytest.approx([0.1] * 3)
    assert "| +10.0 % (+10.0 - +10.0) [+10.0 - +10.0] | unseen |" in markdown(faster, LOOP, OPTIONS, {"date": "today"})
