"""What the placement benchmarks make of their cells: where `cost` is behind, how ratios spread."""

import random
from pathlib import Path

import pytest

from benchmarks.placement import Cell, Run, behind, measure, play, spread
from benchmarks.placement_real import TURN, TURNS, draw


def cell(policy: str, ttft: tuple[float, ...], cached: float = 0.5) -> Cell:
    mean = sum(ttft) / len(ttft)
    return Cell("t", policy, 0.8, 1.0, sorted(ttft)[len(ttft) // 2], max(ttft), mean, cached, 0.0, 8.0, ttft)


def test_where_cost_is_behind_is_told_with_its_spread() -> None:
    quick, slow = tuple(0.1 + i % 7 / 100 for i in range(400)), tuple(0.2 + i % 7 / 50 for i in range(400))
    assert behind([cell("cost", quick), cell("prefix", slow)]) == []
    assert behind([cell("cost", quick), cell("prefix", quick, cached=0.505)]) == []
    told = behind([cell("cost", slow, cached=0.4), cell("prefix", quick)])
    assert [line.split(" is ")[0].split(" are ")[0] for line in told] == [
        "t at 0.8: TTFT p50",
        "t at 0.8: TTFT p99",
        "t at 0.8: TTFT mean",
        "t at 0.8: cached positions",
    ]
    assert "2.000 times that of prefix (2.00 - 2.00)" in told[2]


def test_the_spread_is_of_stretches_that_both_have_alike() -> None:
    """One slow stretch in forty: with it, without it, or with it several times."""
    usual = (1.0,) * 400
    odd = (11.0,) * 10 + usual[10:]
    low, high = spread(cell("a", odd), cell("b", usual), "mean")
    assert low == 1.0 < 1.25 < high <= 2.0
    assert spread(cell("a", odd), cell("b", odd), "mean") == (1.0, 1.0)


def test_a_cell_is_played(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    line = '{{"timestamp": {at}, "input_length": 4096, "output_length": 3, "hash_ids": [0, 1, 2, 3, 4, 5, 6, {last}]}}'
    path.write_text("\n".join(line.format(at=2000 * i, last=100 + i) for i in range(6)))
    found = play(Run(path, 5, "cost", 0.5, 0.5, 0))
    assert len(found.ttft) == 5
    assert found.cached == pytest.approx(4 * 7 / (5 * 8))
    with pytest.raises(ValueError, match="mean"):
        measure(Run(path, 5, "cost", 0.5, 0.5, 0), [])


def test_turns_of_a_chat_follow_each_other() -> None:
    asks = draw(6, 2.0, random.Random(1))
    assert len(asks) == 6 * TURNS
    assert [a.at for a in asks] == sorted(a.at for a in asks)
    for number, ask in enumerate(asks):
        before = [a for a in asks[:number] if ask.prompt.startswith(a.prompt)]
        assert len(ask.prompt) == TURN * (1 + len(before))
