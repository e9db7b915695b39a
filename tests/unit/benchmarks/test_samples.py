"""Requests survive the way into a result and out again; what is drawn from them is what they say."""

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given

from benchmarks.plots.data import courses, curves, load_curves, steps
from benchmarks.samples import pack, unpack
from benchmarks.timeline import Timeline

START = 1000.0


def timeline(kind: str, sent: float, *after: float, error: str | None = None) -> Timeline:
    """Chunks so many seconds after sending."""
    return Timeline(kind, START + sent, tuple(START + sent + at for at in after), 128, len(after), error)


def run(workload: str, setup: str, timelines: list[Timeline]) -> dict[str, object]:
    return {"workload": workload, "setup": setup, "seconds": 9.0, "samples": pack(timelines, START)}


@given(st.lists(st.floats(0, 600), min_size=1, max_size=50))
def test_times_are_kept_to_a_tenth_of_a_millisecond(after: list[float]) -> None:
    (sample,) = unpack(orjson.loads(orjson.dumps(pack([timeline("chat", 1.5, *sorted(after))], START))))
    assert (sample.kind, sample.sent, sample.ok, sample.prompt_tokens) == ("chat", 1.5, True, 128)
    assert sample.chunks == pytest.approx([1.5 + at for at in sorted(after)], abs=0.000051)
    assert sum(sample.gaps) == pytest.approx(sample.chunks[-1] - sample.chunks[0])


def test_what_never_came_is_kept_too_and_requests_are_in_order() -> None:
    samples = unpack(pack([timeline("chat", 2, error="HTTP 503"), timeline("long", 1, 0.25)], START))
    assert [(one.kind, one.ok, one.ttft) for one in samples] == [("long", True, 0.25), ("chat", False, None)]


def test_samples_are_small() -> None:
    chat = timeline("chat", 3.2, *(0.1 + 0.0271 * at for at in range(128)))
    assert len(orjson.dumps(pack([chat], START))) < 700


def test_latencies_are_those_of_chats_that_went_well() -> None:
    good, long, bad = timeline("chat", 0, 0.1, 0.3), timeline("long", 0, 5.0), timeline("chat", 0, 9.0, error="cut")
    document = {"runs": [run("mix", "split", [good, long, bad]), run("mix", "split", [good])]}
    (found,) = curves(document)
    assert found.workload == "mix"
    assert found.ttft == {"split": pytest.approx([0.1, 0.1])}
    assert found.itl == {"split": pytest.approx([0.2, 0.2])}


def test_an_interference_run_is_shown_when_both_set_ups_have_one() -> None:
    mixed = [timeline("chat", 0, 1.0, 3.0), timeline("long", 1, 1.5, 2.0)]
    split, aggregated = run("interference", "split", mixed), run("interference", "aggregated", mixed)
    assert courses({"runs": [split]}) == []
    found = courses({"runs": [aggregated, run("other", "split", [timeline("chat", 0, 1)]), split, split]})
    assert [course.setup for course in found] == ["split", "aggregated"]
    course = found[0]
    assert course.long_reads == [(1.0, 2.5)]
    assert course.gaps == [(3.0, 2.0)], "of chats alone"
    assert (course.reading.times, course.reading.counts) == ([0.0, 1.0, 2.5], [1, 1, 0])
    assert (course.writing.times, course.writing.counts) == ([0.0, 1.0, 2.5, 3.0], [0, 1, 2, 0])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair) + 1))))
def test_steps_count_what_holds(spans: list[tuple[int, int]]) -> None:
    found = steps([(float(start), float(end)) for start, end in spans])
    for at in range(23):
        held = sum(start <= at < end for start, end in spans)
        assert [count for time, count in zip(found.times, found.counts, strict=True) if time <= at][-1] == held


def test_load_curves_of_both_benchmarks() -> None:
    point = {"times": 2.0, "sent": 60, "rate": 20.0, "refused": 30, "goodput": 9.5, "ttft_p50": 100.0, "ttft_p99": None}
    (measured,) = load_curves({"points": [point], "slo_s": 2.0, "capacity": 10.0})
    assert measured.points[0].refused == pytest.approx(10.0)
    assert (measured.points[0].ttft_p50, measured.points[0].ttft_p99) == (0.1, None)
    cell = {"trace": "t", "load": 1.0, "rate": 5.0, "asked": 50, "refused": 10, "goodput": 4.0}
    (modelled,) = load_curves({"cells": [{**cell, "ttft_p50": 0.5, "ttft_p99": 1.5}]})
    assert (modelled.name, modelled.points[0].refused, modelled.points[0].ttft_p99) == ("t", 1.0, 1.5)
    assert load_curves({"cells": [{"trace": "t", "load": 0.5, "policy": "cost"}]}) == []


def test_old_results_have_nothing_to_draw() -> None:
    old = {"runs": [{"workload": "mix", "setup": "split", "seconds": 1.0, "figures": {}}]}
    assert (curves(old), courses(old), load_curves(old)) == ([], [], [])
