"""The figures of benchmarks.hostile: ratios within a round, and only what was refused counts as refused."""

from benchmarks.hostile import ABSURD, ALONE, BOMBS, Turn, answered, markdown, ratios

ROUNDS = [
    {
        ALONE: Turn([10.0] * 100),
        BOMBS: Turn([11.0] * 100, {200: [900.0], 400: [2.0, 60.0]}),
        ABSURD: Turn([20.0] * 100, {400: [1.0]}),
    },
    {ALONE: Turn([20.0] * 100), BOMBS: Turn([20.0] * 100, {400: [4.0]}), ABSURD: Turn([20.0] * 100, {400: [3.0]})},
]


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(ROUNDS, BOMBS, 50) == [1.1, 1.0]
    assert ratios(ROUNDS, ABSURD, 99) == [2.0, 1.0]


def test_what_was_served_is_not_told_among_the_refused() -> None:
    assert answered(ROUNDS, BOMBS, 400) == [2.0, 60.0, 4.0]
    text = markdown(ROUNDS, {})
    assert "1.05 (1.00 - 1.10) | 1.05 (1.00 - 1.10) | 1 x 200, 3 x 400 |" in text
    assert "| bombs | 4 | 58.9 | 60 | 1 of 3 |" in text
    assert "| absurd | 2 | 2.98 | 3 | 0 of 2 |" in text
