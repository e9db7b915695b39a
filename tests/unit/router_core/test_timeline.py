"""A request as a row of parts: they touch, and add up, whatever happened to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.records import AttemptRecord, RequestRecord
from router.requests import Trace
from router.timeline import Part, parts, total_ms

ARRIVED = 100.0


def record(*attempts: AttemptRecord, ended: float | None = None, outcome: str = "", trace: Trace) -> RequestRecord:
    """Admitted 10 ms after it arrived; times in milliseconds since admission."""
    made = RequestRecord("r", "p", 9, 9, 1, "", ARRIVED + 0.01, trace, list(attempts))
    made.ended_ms, made.outcome = ended, outcome
    return made


def attempt(
    placed: float,
    accepted: float | None = None,
    first: float | None = None,
    ended: float | None = None,
    outcome: str = "",
    exposed: float | None = None,
    kv_from: str = "prefill-0",
) -> AttemptRecord:
    made = AttemptRecord("decode-0", (), False, (), placed, accepted, first, ended, outcome)
    made.exposed_ms, made.kv_from = exposed, kv_from
    return made


def shown(row: list[Part]) -> list[tuple[str, float, int, bool]]:
    return [(part.name, round(part.end_ms - part.start_ms, 6), part.attempt, part.lost) for part in row]


def test_a_request_that_went_well() -> None:
    trace = Trace(arrived=ARRIVED, left=ARRIVED + 0.4)
    made = record(attempt(20, 25, 125, 385, "ok", 15), ended=385, outcome="ok", trace=trace)
    assert shown(parts(made, 999.0)) == [
        ("receive", 10, 0, False),
        ("queue", 20, 0, False),
        ("admit", 5, 1, False),
        ("prefill", 100, 1, False),
        ("transfer", 15, 1, False),
        ("decode", 245, 1, False),
        ("delivery", 5, 0, False),
    ]
    assert round(total_ms(made, 999.0), 6) == 400


def test_a_failed_attempt_is_shown_as_lost_and_done_again() -> None:
    trace = Trace(arrived=ARRIVED, left=ARRIVED + 0.3)
    attempts = attempt(0, 5, 55, 90, "lost: gone"), attempt(100, 105, 150, 290, "ok", 0.0)
    made = record(*attempts, ended=290, outcome="ok", trace=trace)
    assert shown(parts(made, 999.0)) == [
        ("receive", 10, 0, False),
        ("admit", 5, 1, True),
        ("prefill", 50, 1, True),
        ("transfer", 35, 1, True),
        ("queue", 10, 0, False),
        ("admit", 5, 2, False),
        ("prefill", 45, 2, False),
        ("decode", 140, 2, False),
    ]


@pytest.mark.parametrize("outcome", ["deadline: not finished within 1 s", "invalid: no such token", "failed: gone"])
def test_what_nobody_did_again_is_not_lost(outcome: str) -> None:
    """The request ended with its last attempt."""
    trace = Trace(arrived=ARRIVED, left=ARRIVED + 0.3)
    last = attempt(100, 105, 150, 290, outcome)
    made = record(attempt(0, 5, None, 90, "lost: gone"), last, ended=290, outcome=outcome, trace=trace)
    assert {part.attempt for part in parts(made, 999.0) if part.lost} == {1}
    assert [part.name for part in parts(made, 999.0) if part.attempt == 2] == ["admit", "prefill", "transfer"]


def test_what_runs_ends_now() -> None:
    made = record(attempt(20, 25, kv_from=""), trace=Trace(arrived=ARRIVED))
    assert [part.name for part in parts(made, ARRIVED + 0.135)] == ["receive", "queue", "admit", "prefill"]
    assert round(total_ms(made, ARRIVED + 0.135), 6) == 135
    waiting = record(trace=Trace(arrived=ARRIVED))
    assert shown(parts(waiting, ARRIVED + 0.05)) == [("receive", 10, 0, False), ("queue", 40, 0, False)]
    handing_off = record(attempt(20, 25, 30), trace=Trace(arrived=ARRIVED))
    assert [part.name for part in parts(handing_off, ARRIVED + 0.1)][-1] == "transfer"


def test_without_a_front_door_a_row_reaches_from_admission_to_the_end() -> None:
    made = record(attempt(0, 5, 10, 50, "ok", 1), ended=50, outcome="ok", trace=Trace())
    assert [part.name for part in parts(made, 999.0)] == ["admit", "prefill", "transfer", "decode"]
    assert round(total_ms(made, 999.0), 6) == 50


MARK = st.none() | st.floats(0, 1000)


@given(
    st.lists(st.tuples(st.floats(0, 1000), MARK, MARK, MARK, st.sampled_from(["", "ok", "lost: x"]), MARK), max_size=4),
    MARK,
    st.none() | st.floats(0, 2),
    st.floats(0, 3),
)
def test_parts_touch_and_add_up_whatever_the_marks_say(
    attempts: list[tuple[float, float | None, float | None, float | None, str, float | None]],
    ended: float | None,
    left: float | None,
    now: float,
) -> None:
    trace = Trace(arrived=ARRIVED, left=None if left is None else ARRIVED + left)
    made = record(*(attempt(*marks) for marks in attempts), ended=ended, trace=trace)
    row, at = parts(made, ARRIVED + now), 0.0
    for part in row:
        assert part.start_ms == at
        assert part.end_ms > at
        at = part.end_ms
    total = total_ms(made, ARRIVED + now)
    assert at == total or (not row and total == 0)
