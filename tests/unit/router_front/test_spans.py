"""Spans from the marks of a record: what is known is there, inside its attempt, and nothing is made up."""

from dataclasses import replace

from router.front.spans import CallMarks, Part, parts_of
from router.placement import Placement, Shape, WorkerLoad
from router.records import RequestRecord, record_of
from router.requests import Request, Trace

CALL = CallMarks(started=100.0, ended=101.0, first_token=100.5)


def record(trace: Trace | None = None) -> RequestRecord:
    return record_of(Request("ours", "req-1", prompt=(1, 2), max_tokens=3), trace or Trace(), 100.25)


def placed(made: RequestRecord, at: float, *, decode: str = "decode-0") -> None:
    worker = WorkerLoad("", decode, 1, Shape(1, (1, 1, 2, 16, "x"), b""), 64, 64)
    made.placed(Placement(worker, (replace(worker, name="prefill-0"),), False, 64, 1.0, ()), at)


def span(parts: list[Part] | tuple[Part, ...], name: str) -> Part:
    (found,) = (part for part in parts if part.name == name)
    return found


def times(part: Part) -> tuple[float, float]:
    return round(part.start, 6), round(part.end, 6)


def test_a_call_that_was_refused_is_parsed_and_no_more() -> None:
    (only,) = parts_of(replace(CALL, first_token=None), [])
    assert (only.name, times(only)) == ("parse", (100.0, 101.0))


def test_a_request_that_never_left_the_line_has_waited() -> None:
    made = record()
    made.ended("overloaded", 100.75)
    parts = parts_of(replace(CALL, first_token=None), [made])
    assert [part.name for part in parts] == ["parse", "queue"]
    assert times(span(parts, "queue")) == (100.25, 100.75)


def test_a_hand_off_has_its_chunks_and_the_transfer_beside_them() -> None:
    timings = {"prefill": 120.0, "offer_wait": 50.0, "transfer_wire": 30.0, "transfer_verify": 6.0,
               "transfer_publish": 0.0, "exposed_transfer": 10.0}  # fmt: skip
    made = record(Trace("prefill-0", "decode-0", kv_bytes=640, timings_ms=timings, offers=((32, 50.0), (64, 115.0))))
    placed(made, 100.3)
    attempt = made.attempts[0]
    attempt.accepted_ms, attempt.first_token_ms = 60.0, 190.0
    made.attempt_ended(attempt, "ok", 100.9)
    made.ended("ok", 100.9)
    parts = parts_of(CALL, [made])
    assert [part.name for part in parts] == ["parse", "queue", "place", "prefill", "transfer", "decode", "text"]
    assert times(span(parts, "place")) == (100.3, 100.31)
    assert span(parts, "place").attributes == {"headrace.decode": "decode-0", "headrace.attempt": "ours.1"}
    prefill, transfer = span(parts, "prefill"), span(parts, "transfer")
    assert times(prefill) == (100.31, 100.43)
    assert [(times(chunk), chunk.attributes) for chunk in prefill.inside] == [
        ((100.31, 100.36), {"headrace.until_position": 32}),
        ((100.36, 100.425), {"headrace.until_position": 64}),
    ]
    assert times(transfer) == (100.36, 100.435)
    assert transfer.attributes["headrace.kv_bytes"] == 640
    assert times(span(parts, "decode")) == (100.44, 100.9)
    assert times(span(parts, "text")) == (100.5, 101.0)


def test_a_failed_over_request_has_both_attempts_and_the_wait_between_them() -> None:
    made = record(Trace("local", "decode-1"))
    placed(made, 100.25)
    made.attempts[0].accepted_ms, made.attempts[0].first_token_ms = 10.0, 20.0
    made.attempt_ended(made.attempts[0], "lost", 100.35)
    placed(made, 100.45, decode="decode-1")
    made.attempts[1].accepted_ms, made.attempts[1].first_token_ms = 210.0, 220.0
    made.attempt_ended(made.attempts[1], "ok", 100.85)
    made.ended("ok", 100.85)
    parts = parts_of(CALL, [made])
    assert [part.name for part in parts].count("queue") == 2
    assert [p.attributes["headrace.decode"] for p in parts if p.name == "decode"] == ["decode-0", "decode-1"]
    assert times([p for p in parts if p.name == "queue"][1]) == (100.35, 100.45)


def test_no_part_is_longer_than_its_attempt_whatever_the_worker_s_clock_says() -> None:
    timings = {"prefill": 9_000.0, "exposed_transfer": 9_000.0}
    made = record(Trace("prefill-0", "decode-0", timings_ms=timings, offers=((16, 8_000.0),)))
    placed(made, 100.3)
    made.attempts[0].accepted_ms = 60.0
    made.attempt_ended(made.attempts[0], "cancelled", 100.5)
    made.ended("cancelled", 100.5)
    for part in parts_of(replace(CALL, first_token=None), [made]):
        for inner in (part, *part.inside):
            assert inner.start <= inner.end <= 101.0
            assert part.name == "parse" or inner.end <= 100.5
