"""Times read off hand-made timelines."""

import pytest

from benchmarks.timeline import Handoff, Slo, Timeline, percentile, split_gaps

MOVED = Handoff(kv_bytes=1000, offer_wait=0.2, wire=0.01, verify=0.02, exposed=0.05, prefill=0.5)


def line(sent: float, *chunks: float, kind: str = "chat", tokens: int | None = None, **more: object) -> Timeline:
    output = len(chunks) if tokens is None else tokens
    return Timeline(kind, sent, chunks, prompt_tokens=8, output_tokens=output, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([float(v) for v in range(101)], 99, 99.0),
        ([0.0, 10.0], 99, 9.9),
        ([5.0, 1.0], 0, 1.0),
        ([5.0, 1.0], 100, 5.0),
    ],
)
def test_percentiles_interpolate(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == (None if expected is None else pytest.approx(expected))


def test_the_times_of_one_request() -> None:
    timeline = line(10.0, 10.5, 11.5, 11.75)
    assert timeline.ttft == 0.5
    assert timeline.ttst == 1.5
    assert timeline.e2e == 1.75
    assert [end - start for start, end in timeline.gaps] == [1.0, 0.25]
    assert timeline.tpot == pytest.approx(1.25 / 2)


def test_tpot_counts_tokens_where_itl_counts_chunks() -> None:
    joined = line(0.0, 1.0, 2.0, 3.0, tokens=9)
    assert joined.tpot == pytest.approx(2.0 / 8)
    assert len(joined.gaps) == 2


def test_a_single_token_has_neither_second_token_nor_tpot() -> None:
    single = line(0.0, 1.0)
    assert (single.ttst, single.tpot, single.gaps) == (None, None, [])
    assert single.prompt_window() == (0.0, 1.0)
    assert Slo(ttft=1.0, tpot=0.1).kept(single)


@pytest.mark.parametrize(
    ("timeline", "kept"),
    [
        (line(0.0, 2.0, 2.08), True),
        (line(0.0, 2.1, 2.15), False),
        (line(0.0, 1.0, 1.2), False),
        (line(0.0, 1.0, 1.01, error="the stream was cut"), False),
        (line(0.0, error="HTTP 503"), False),
    ],
)
def test_good_requests_keep_both_limits_and_complete(timeline: Timeline, kept: bool) -> None:
    assert Slo(ttft=2.0, tpot=0.0801).kept(timeline) is kept


def test_gaps_are_split_by_what_others_do() -> None:
    running = line(0.0, 1.0, 2.0, 3.0, 4.0)
    other = line(1.5, 2.5, 2.75, 5.0)  # its prompt is read and handed off from 1.5 to 2.75
    windows = [(t, t.prompt_window()) for t in (running, other)]
    during, quiet = split_gaps([running], windows)
    assert during == [1.0, 1.0]
    assert quiet == [1.0]
    assert split_gaps([running], [(running, (0.0, 9.0))]) == ([], [1.0, 1.0, 1.0])  # not by what it does itself


def test_a_gap_that_only_touches_a_window_is_quiet() -> None:
    running, other = line(0.0, 1.0, 2.0), line(2.0, 3.0)
    assert split_gaps([running], [(other, other.prompt_window())]) == ([], [1.0])


def test_kv_moves_from_the_first_offer_until_ready_to_decode() -> None:
    moved = line(0.0, 1.0, 2.0, handoff=MOVED)
    assert moved.transfer_window() == pytest.approx((1.0 - 0.3, 1.05))
    assert line(0.0, 1.0).transfer_window() is None
