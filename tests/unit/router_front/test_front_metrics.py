"""One outcome per call, and gauges that come from what is there."""

import asyncio
from contextlib import nullcontext

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster.core.clock import ManualClock
from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestFailed, Unavailable
from router.front.metrics import ClientGone, FrontMetrics, StatusCollector


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
        if s.name.endswith("_total")
    }
    assert counted == {outcome: 1}
    assert value(registry, "headrace_requests_in_flight") == 0
    assert value(registry, "headrace_e2e_seconds_count", api="chat") == (1 if error is None else 0)


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


def test_numbers_of_a_status_become_gauges() -> None:
    status: dict[str, object] = {
        "queue": 3,
        "ready": True,
        "version": "x",
        "by_reason": {"full": 2},
        "workers": {"d-0": {"free-blocks": 7, "state": "ok"}},
        "routers": [{"name": "r1", "sessions": 4}],
    }
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status))
    assert value(registry, "headrace_dispatcher_queue", name="") == 3
    assert value(registry, "headrace_dispatcher_ready", name="") == 1
    assert value(registry, "headrace_dispatcher_by_reason", name="full") == 2
    assert value(registry, "headrace_dispatcher_workers_free_blocks", name="d-0") == 7
    assert value(registry, "headrace_dispatcher_routers_sessions", name="r1") == 4
    assert b"version" not in generate_latest(registry)
