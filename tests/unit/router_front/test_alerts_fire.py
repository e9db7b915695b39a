"""Every alert fires when it should and is silent just before, over the samples of a moment that two routers tell."""

import math

import pytest

from tests.promql import answer, sides
from tests.queries import rules

CONDITIONS = {rule["alert"]: rule["expr"] for rule in rules()}
Told = list[tuple[str, dict[str, str], float]]


def one(router: str, name: str, value: float, **labels: str) -> Told:
    """What one router tells."""
    return [(f"headrace_{name}", {"instance": router, **labels}, value)]


def both(name: str, value: float, **labels: str) -> Told:
    """What both tell: each of its own requests, and the same of workers and pairs."""
    return one("a", name, value, **labels) + one("b", name, value, **labels)


def histogram(name: str, counts: dict[str, float], **labels: str) -> Told:
    """`counts`: how many are below each bound."""
    return [each for le, count in counts.items() for each in both(f"{name}_bucket", count, le=le, **labels)]


def outcomes(**counts: float) -> Told:
    return [each for outcome, count in counts.items() for each in both("requests_total", count, outcome=outcome)]


def pools(name: str, **counts: float) -> Told:
    state = {"state": "ready"} if name == "workers" else {}
    return [each for pool, count in counts.items() for each in both(name, count, pool=pool, **state)]


def worker(name: str, value: float, **labels: str) -> Told:
    return both(f"worker_{name}", value, pool="decode", worker="decode-0", **labels)


def blocks(in_use: float, cached: float, free: float) -> Told:
    states = {"in_use": in_use, "cached": cached, "free": free}
    return [each for state, count in states.items() for each in worker("blocks", count, state=state)]


def pair(name: str, value: float, **labels: str) -> Told:
    return both(f"pair_{name}", value, prefill="prefill-0", decode="decode-0", **labels)


DONE = both("dispatched_total", 100, outcome="ok")
NO_PREFILL_WANTED = pools("desired_programs", prefill=0)
FIRES_AND_NOT: dict[str, tuple[Told, Told]] = {
    "HeadraceNoPairReady": (both("router_ready", 0), one("a", "router_ready", 0) + one("b", "router_ready", 1)),
    "HeadraceNoPrefillWorker": (
        pools("workers", prefill=0, decode=1) + pools("desired_programs", prefill=1),
        pools("workers", prefill=0, decode=1) + NO_PREFILL_WANTED,
    ),
    "HeadraceFewerThanDesired": (
        pools("workers", prefill=1, decode=1) + pools("desired_programs", prefill=1, decode=2),
        pools("workers", prefill=2, decode=2) + pools("desired_programs", prefill=1, decode=2),
    ),
    "HeadraceWorkerNotReady": (
        worker("state", 0, state="ready") + worker("state", 1, state="suspect"),
        worker("state", 1, state="draining") + worker("state", 0, state="suspect"),
    ),
    "HeadraceWorkerRestarts": (worker("restarts_total", 3), worker("restarts_total", 2)),
    "HeadraceRequestsFail": (
        outcomes(ok=980, failed=4, unavailable=4, deadline=3, invalid=9),
        outcomes(ok=900, failed=4, unavailable=3, deadline=2, invalid=91),
    ),
    "HeadraceOverloaded": (outcomes(ok=988, overloaded=12), outcomes(ok=991, overloaded=9)),
    "HeadraceFirstTokenSlow": (
        histogram("ttft_seconds", {"1.0": 90, "2.0": 94, "4.0": 100, "+Inf": 100}),
        histogram("ttft_seconds", {"1.0": 90, "2.0": 96, "4.0": 100, "+Inf": 100}),
    ),
    "HeadraceTokensSlow": (
        histogram("itl_seconds", {"0.05": 90, "0.1": 94, "0.2": 100, "+Inf": 100}),
        histogram("itl_seconds", {"0.05": 90, "0.1": 96, "0.2": 100, "+Inf": 100}),
    ),
    "HeadraceDecodePoolFull": (blocks(96, 2, 2), blocks(94, 6, 0)),
    "HeadracePreemptions": (
        DONE + both("attempts_left_total", 6, reason="preempted"),
        DONE + both("attempts_left_total", 4, reason="preempted") + both("attempts_left_total", 50, reason="refused"),
    ),
    "HeadraceHandOffsFail": (
        pair("jobs_sent_total", 100) + pair("jobs_total", 6, outcome="link lost"),
        pair("jobs_sent_total", 100) + pair("jobs_total", 4, outcome="link lost") + pair("jobs_total", 50, outcome="ok")
        + pair("jobs_total", 46, outcome="refused"),
    ),
    "HeadracePrefillShort": (  # a worker's own are told by both routers, and requests by one of them
        DONE + worker("local_prefills_total", 12, reason="no prefill worker"),
        DONE + worker("local_prefills_total", 9, reason="refused")
        + worker("local_prefills_total", 90, reason="short prompt"),
    ),
    "HeadraceHandOffsExposed": (
        histogram("handoff_seconds", {"0.025": 90, "0.05": 94, "0.1": 100, "+Inf": 100}, part="exposed"),
        histogram("handoff_seconds", {"0.025": 90, "0.05": 96, "0.1": 100, "+Inf": 100}, part="exposed")
        + histogram("handoff_seconds", {"0.05": 0, "0.1": 100, "+Inf": 100}, part="wire"),
    ),
    "HeadraceKvDiffers": (
        worker("events_total", 1, event="prefix_hit_corrupt"),
        worker("events_total", 0, event="digest_mismatch") + worker("events_total", 640, event="kv_bytes"),
    ),
    "HeadraceReadsHang": (pair("slots_set_aside", 1), pair("slots_set_aside", 0)),
    "HeadraceRedisAway": (one("a", "redis_up", 0) + one("b", "redis_up", 1), both("redis_up", 1)),
    "HeadraceControllerAway": (
        both("controller_age_seconds", 61),
        one("a", "controller_age_seconds", 61) + one("b", "controller_age_seconds", 5),
    ),
    "HeadraceUsageBookAway": (one("a", "usage_book_up", 0) + one("b", "usage_book_up", 1), both("usage_book_up", 1)),
    "HeadraceSessionsBreak": (
        one("a", "router_events_total", 6, event="sessions_broken")
        + one("b", "router_events_total", 5, event="watch_gaps"),
        both("router_events_total", 5, event="workers_silent") + both("router_events_total", 99, event="late_messages"),
    ),
}  # fmt: skip


def test_every_alert_is_here() -> None:
    assert list(FIRES_AND_NOT) == list(CONDITIONS)


@pytest.mark.parametrize("alert", CONDITIONS)
def test_it_fires_and_just_before_it_does_not(alert: str) -> None:
    fires, silent = FIRES_AND_NOT[alert]
    assert answer(CONDITIONS[alert], fires)
    assert not answer(CONDITIONS[alert], silent)
    compared = sides(CONDITIONS[alert], silent)
    assert all(map(math.isfinite, compared[0].values())), "silent for what it is told, not for want of it"
    assert compared[0]


def test_without_any_router_there_is_none_ready() -> None:
    assert answer(CONDITIONS["HeadraceNoPairReady"], [])


def test_where_nothing_happened_no_share_of_it_is_too_much() -> None:
    for alert in ("HeadraceRequestsFail", "HeadraceOverloaded"):
        assert not answer(CONDITIONS[alert], outcomes(ok=0, failed=0, overloaded=0))


MEDIAN = "histogram_quantile(0.5, sum by (le) (headrace_h_bucket))"
HALF_IN_THE_MIDDLE = histogram("h", {"1": 2, "3": 6, "+Inf": 8})
BY_POOL = "avg by (pool) (headrace_x)"


@pytest.mark.parametrize(
    ("query", "told", "expected"),
    [
        (BY_POOL, worker("y", 1) + both("x", 2, pool="p") + both("x", 4, pool="p", w="1"), {"p": 3.0}),
        ("headrace_x / scalar(sum(headrace_y))", one("a", "x", 6) + both("y", 2), {None: 1.5}),
        ("headrace_x >= 3", one("a", "x", 3) + one("b", "x", 2), {None: 3.0}),
        (MEDIAN, HALF_IN_THE_MIDDLE, {None: 2.0}),
        (MEDIAN.replace("0.5", "0.9"), HALF_IN_THE_MIDDLE, {None: 3.0}),
    ],
)  # fmt: skip
def test_what_the_small_evaluator_makes_of_it(query: str, told: Told, expected: dict[str | None, float]) -> None:
    assert {dict(labels).get("pool"): value for labels, value in answer(query, told).items()} == expected


@pytest.mark.parametrize("query", ["sum without (pool) (x)", "topk(2, x)", "x == bool 1", "x / on (pool) y", "-x"])
def test_what_it_does_not_know_it_says(query: str) -> None:
    with pytest.raises(NotImplementedError):
        answer(query, [("x", {}, 1.0), ("y", {}, 1.0)])
