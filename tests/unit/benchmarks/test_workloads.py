"""Loads drawn from a seed."""

import random
from itertools import pairwise

import pytest

from benchmarks.workloads import Workload, Writer, draw, evenly, poisson, profile

MIXED = Workload("mixed", 128, 64, duration_s=200.0, rate=2.0, long_rate=0.05, long_prompt_tokens=500)
CLOSED = Workload("closed", 32, 16, concurrency=4, count=10)


def test_the_same_seed_draws_the_same_load() -> None:
    assert draw(MIXED, 1, 0, Writer()) == draw(MIXED, 1, 0, Writer())


def test_a_repetition_keeps_the_arrivals_and_changes_every_prompt() -> None:
    first, again = draw(MIXED, 1, 0, Writer()), draw(MIXED, 1, 1, Writer())
    assert [(a.at, a.kind) for a in first] == [(a.at, a.kind) for a in again]
    assert not {a.prompt for a in first} & {a.prompt for a in again}


def test_another_seed_changes_the_arrivals() -> None:
    assert [a.at for a in draw(MIXED, 1, 0, Writer())] != [a.at for a in draw(MIXED, 2, 0, Writer())]


def test_long_prompts_leave_the_chats_as_they_were() -> None:
    without = Workload("mixed", 128, 64, duration_s=200.0, rate=2.0)
    assert [a for a in draw(MIXED, 1, 0, Writer()) if a.kind == "chat"] == draw(without, 1, 0, Writer())


def test_prompts_have_the_length_asked_for_and_are_unique() -> None:
    asks = draw(MIXED, 3, 0, Writer())
    assert {len(a.prompt.split()) for a in asks if a.kind == "chat"} == {128}
    assert {len(a.prompt.split()) for a in asks if a.kind == "long"} == {500}
    assert len({a.prompt[:64] for a in asks}) == len(asks)
    assert {len(a.prompt.encode()) for a in draw(CLOSED, 1, 0, Writer(per_byte=True))} == {32}


def test_a_closed_loop_has_its_count() -> None:
    asks = draw(CLOSED, 1, 0, Writer())
    assert len(asks) == 10
    assert {a.max_tokens for a in asks} == {16}


def test_poisson_arrivals() -> None:
    times = poisson(5.0, 400.0, random.Random("arrivals"))
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 400
    assert len(times) == pytest.approx(2000, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # exponential gaps
    assert poisson(0.0, 10.0, random.Random()) == []


def test_even_arrivals() -> None:
    assert evenly(0.05, 60.0) == pytest.approx([10, 30, 50])
    assert evenly(1 / 12, 12.0) == pytest.approx([6])
    assert evenly(0.0, 60.0) == []


@pytest.mark.parametrize(("name", "seeds"), [("quick", 1), ("default", 1), ("full", 3)])
def test_profiles(name: str, seeds: int) -> None:
    chosen = profile(name)
    assert len(chosen.seeds) == seeds
    assert [w.name for w in chosen.workloads] == ["single stream", "concurrent", "interference"]
    assert all(draw(w, 1, 0, Writer(per_byte=True)) for w in chosen.workloads)
