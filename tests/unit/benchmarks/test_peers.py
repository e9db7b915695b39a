"""Ratios are taken turn by turn, the search ends at the highest rate served, and the page says what is missing."""

import orjson
import pytest

from benchmarks.bench import Run
from benchmarks.figures import Figures, Spread
from benchmarks.peers.aims import AIMS, RATE, Aim, judge
from benchmarks.peers.plan import (
    AGGREGATED,
    CAPACITY,
    INT8,
    LLAMA,
    MANY,
    MIXED,
    SERVERS,
    SINGLE,
    SIZES,
    SPLIT,
    VLLM_AGGREGATED,
    VLLM_SPLIT,
    Search,
    chats,
    probe,
    stages,
    turns,
)
from benchmarks.peers.report import Outcome, document, markdown
from benchmarks.workloads import Writer, draw

TPOT = AIMS[0]


def run(work: str, setup: str, seed: int, **figures: float) -> Run:
    found: Figures = dict(figures)
    return Run(work, setup, seed, 0, 1.0, found, {}, [])


def single(setup: str, *tpots: float) -> list[Run]:
    return [run(SINGLE, setup, seed, tpot_p50=tpot) for seed, tpot in enumerate(tpots)]


def test_a_ratio_is_of_the_same_turn() -> None:
    found = judge(TPOT, single(AGGREGATED, 10.0, 30.0, 20.0) + single(VLLM_AGGREGATED, 40.0, 60.0, 50.0))
    assert found.ratio == Spread(0.4, 0.25, 0.5)  # least over greatest would be 0.17 to 0.75
    assert (found.ours, found.theirs) == (Spread(20.0, 10.0, 30.0), Spread(50.0, 40.0, 60.0))
    assert found.reached


def test_turns_that_only_one_of_them_took_do_not_count() -> None:
    found = judge(TPOT, single(AGGREGATED, 10.0, 1000.0) + single(VLLM_AGGREGATED, 10.0))
    assert found.ratio == Spread(1.0, 1.0, 1.0)
    assert found.ours == Spread(10.0, 10.0, 10.0)
    assert found.reached is False


def test_nothing_to_compare_with() -> None:
    found = judge(TPOT, single(AGGREGATED, 10.0))
    assert (found.ratio, found.reached) == (None, None)


@pytest.mark.parametrize(("own", "reached"), [(2.0, True), (0.0, False)])
def test_a_peer_that_serves_nothing_has_no_ratio_and_is_beaten_by_anything(own: float, reached: bool) -> None:
    rate = next(aim for aim in AIMS if aim.work == CAPACITY)
    runs = [run(CAPACITY, setup, 1, rate=served) for setup, served in ((SPLIT, own), (VLLM_SPLIT, 0.0))]
    found = judge(rate, runs)
    assert (found.theirs, found.ratio, found.reached) == (Spread(0.0, 0.0, 0.0), None, reached)


@pytest.mark.parametrize(("most", "best"), [(True, 0.5), (False, 0.25)])
def test_the_better_of_two_peers(most: bool, best: float) -> None:
    aim = Aim("", SINGLE, "tpot_p50", SPLIT, (VLLM_SPLIT, VLLM_AGGREGATED), 1.0, most)
    runs = single(SPLIT, 10.0, 10.0) + single(VLLM_SPLIT, 20.0, 40.0) + single(VLLM_AGGREGATED, 40.0, 20.0)
    assert judge(aim, runs).ratio == Spread(best, best, best)


def test_a_share_stands_for_itself() -> None:
    [aim] = [aim for aim in AIMS if not aim.theirs]
    found = judge(aim, [run(MIXED, SPLIT, 1, attainment=1.0), run(MIXED, SPLIT, 2, attainment=0.9)])
    assert found.ratio == Spread(0.95, 0.9, 1.0)
    assert found.reached is False


def searched(highest: float) -> tuple[float | None, int]:
    search, tries = Search(), 0
    while (rate := search.rate) is not None:
        search, tries = search.told(rate, rate <= highest), tries + 1
    return search.low, tries


@pytest.mark.parametrize("highest", [0.13, 0.5, 0.99, 1.0, 1.7, 3.0, 9.4])
def test_the_search_ends_within_a_tenth_below(highest: float) -> None:
    low, tries = searched(highest)
    assert low is not None
    assert highest / 1.1 < low <= highest
    assert tries <= 8


def test_the_search_gives_up() -> None:
    assert searched(0.05) == (None, 4)


def test_probes_differ_in_arrivals_and_texts() -> None:
    work = chats(CAPACITY, 1.0, 20.0)
    asks = [draw(probe(work, rate), 1, 0, Writer()) for rate in (1.0, 2.0)]
    assert not {ask.prompt for ask in asks[0]} & {ask.prompt for ask in asks[1]}
    assert [sum(ask.kind == "long" for ask in each) for each in asks] == [1, 1]


def test_libraries_and_8_bits_do_what_is_single() -> None:
    [steady] = stages(SIZES["quick"], [SINGLE, MANY])
    every = [*SERVERS, INT8, f"{LLAMA} BF16"]
    single_work, many = steady.works
    assert steady.doers(single_work, every) == every
    assert steady.doers(many, every) == list(SERVERS)


def test_what_a_size_runs() -> None:
    works = {name: [work.name for stage in stages(size) for work in stage.works] for name, size in SIZES.items()}
    assert CAPACITY not in works["quick"]
    assert works["default"][-2:] == [MIXED, CAPACITY]
    assert list(turns(SIZES["full"])) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert all(size.searches <= len(size.seeds) for size in SIZES.values())


def test_every_aim_names_who_takes_part() -> None:
    known = {work.name for stage in stages(SIZES["default"]) for work in stage.works} | {"memory"}
    assert {aim.work for aim in AIMS} == known


def test_the_page() -> None:
    outcome = Outcome(single(AGGREGATED, 10.0, 20.0) + single(VLLM_AGGREGATED, 40.0, 40.0))
    outcome.runs += [run(CAPACITY, SPLIT, 1, **{RATE: 2.0}), run(CAPACITY, VLLM_SPLIT, 1, **{RATE: 1.0})]
    outcome.probes += [run("capacity 2.000", SPLIT, 1, attainment=0.95)]
    outcome.absent["openvino-genai Q8_0"] = "not given (--openvino)"
    text = markdown("a model", SIZES["quick"], outcome, {"processor": "a fast one"})
    assert (
        "| 15 (10 - 20) (headrace aggregated) | 40 (vllm aggregated) | 0.375 (0.250 - 0.500) | <= 0.5 | yes |" in text
    )
    assert "2 (headrace split) | 1 (better of vllm split, vllm aggregated) | 2 | >= 1.3 | yes |" in text
    assert "- absent: openvino-genai Q8_0: not given (--openvino)" in text
    assert "| headrace split | 2.000 (1) | 0.950 | - | - | - |" in text
    assert text.count("not measured") == len(AIMS) - 2
    told = orjson.loads(orjson.dumps(document("a model", SIZES["quick"], outcome, {})))
    assert [aim["reached"] for aim in told["aims"]].count(True) == 2
