"""One outcome per call, and gauges that come from what is there."""

import asyncio
from contextlib import nullcontext
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from cluster.core.clock import ManualClock
from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestFailed, Unavailable
from cluster.stubs.watch_pb2 import Pair
from router.figures import pair_seconds
from router.front.metrics import APIS, ClientGone, FrontMetrics, Outcome
from router.front.usage import Usage
from router.requests import Trace


def value(registry: CollectorRegistry, metric: str, **labels: str) -> float:
    return registry.get_sample_value(metric, labels) or 0.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (InvalidRequest("x"), "client_error"),
        (ClientGone(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (Overloaded("x", retry_after_s=1), "overloaded"),
        (Unavailable("x"), "unavailable"),
        (DeadlineExceeded("x"), "deadline"),
        (RequestFailed("x"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_however_a_call_is_left_one_outcome_is_counted(error: BaseException | None, outcome: str) -> None:
    registry = CollectorRegistry()
    metrics = FrontMetrics(registry, ManualClock())
    with nullcontext() if error is None else pytest.raises(type(error)), metrics.call("chat"):
        assert value(registry, "headrace_requests_in_flight") == 1
        if error is not None:
            raise error
    counted = {
        s.labels["outcome"]: s.value
        for s in next(iter(metrics.requests.collect())).samples
        if s.name.endswith("_total") and s.value
    }
    assert counted == {outcome: 1}
    assert value(registry, "headrace_requests_in_flight") == 0
    assert value(registry, "headrace_e2e_seconds_count", api="chat") == (1 if error is None else 0)


def test_every_outcome_and_time_of_every_api_is_told_from_the_start() -> None:
    """What happens for the first time is then a change, which `rate` sees and alerts are made of."""
    registry = CollectorRegistry()
    FrontMetrics(registry, ManualClock())
    for api in APIS:
        for outcome in get_args(Outcome):
            assert registry.get_sample_value("headrace_requests_total", {"api": api, "outcome": outcome}) == 0
        for name in ("ttft", "itl", "tpot", "e2e"):
            assert registry.get_sample_value(f"headrace_{name}_seconds_count", {"api": api}) == 0


def test_first_token_and_gaps() -> None:
    clock, registry = ManualClock(), CollectorRegistry()
    with FrontMetrics(registry, clock).call("chat") as call:
        clock.advance(2)
        call.tokens(0)
        clock.advance(1)
        call.tokens(1)
        clock.advance(3)
        call.tokens(0)
    assert value(registry, "headrace_ttft_seconds_sum", api="chat") == 2
    assert value(registry, "headrace_ttft_seconds_count", api="chat") == 1
    assert value(registry, "headrace_itl_seconds_sum", api="chat") == 4
    assert value(registry, "headrace_itl_seconds_count", api="chat") == 1


def test_the_mean_gap_between_tokens_is_that_of_samples_that_ended() -> None:
    clock, registry = ManualClock(), CollectorRegistry()
    with FrontMetrics(registry, clock).call("chat") as call:
        call.tokens(0)
        call.tokens(1)
        clock.advance(6)
        call.tokens(0)
        call.tokens(1)
        call.ended([(0, 4)])  # sample 1 was cut off
    assert value(registry, "headrace_tpot_seconds_sum", api="chat") == 2
    assert value(registry, "headrace_tpot_seconds_count", api="chat") == 1


def test_what_a_trace_tells_is_observed_under_the_same_names_as_of_pairs() -> None:
    registry = CollectorRegistry()
    metrics = FrontMetrics(registry, ManualClock())
    trace = Trace(timings_ms={"queue": 500.0, "transfer_wire": 20.0, "exposed_transfer": 3.0, "ttft": 9.0})
    with metrics.call("chat") as call:
        call.used(Usage(prompt=10, completion=3, cached=4), 1, trace)
    assert value(registry, "headrace_queue_seconds_sum") == 0.5
    assert value(registry, "headrace_handoff_seconds_sum", part="wire") == 0.02
    assert value(registry, "headrace_handoff_seconds_sum", part="exposed") == 0.003
    assert value(registry, "headrace_handoff_seconds_count", part="verify") == 0
    parts = {s.labels["part"] for f in registry.collect() if f.name == "headrace_handoff_seconds" for s in f.samples}
    assert parts == set(pair_seconds(Pair()))
    assert (value(registry, "headrace_prompt_tokens_total"), value(registry, "headrace_cached_tokens_total")) == (10, 4)
