"""What users feel, measured at the one place that sees all of it, and one outcome per request (FAULTS O07).

A `Call` is a context manager around everything that happens to one request, from its first byte to its last. However it
is left, it counts exactly one outcome. TTFT and ITL are those of token events as they reach the front door.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from cluster.core.clock import Clock
from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RateLimited, Unavailable
from router.front.usage import Receipt, Usage

Outcome = Literal["ok", "client_error", "cancelled", "limited", "overloaded", "unavailable", "deadline", "failed"]

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 2, 5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


class ClientGone(Exception):
    """The client went away. No error of the system: nobody is left to be told."""


def outcome_of(error: BaseException | None) -> Outcome:
    """The one outcome that an exception (None: success) stands for."""
    match error:
        case None:
            return "ok"
        case InvalidRequest():
            return "client_error"
        case ClientGone() | asyncio.CancelledError():
            return "cancelled"
        case RateLimited():
            return "limited"
        case Overloaded():
            return "overloaded"
        case Unavailable():
            return "unavailable"
        case DeadlineExceeded():
            return "deadline"
        case _:
            return "failed"


@dataclass(frozen=True, slots=True)
class ApiTimes:
    """The times of one API. Looking a label up costs more than to observe, and tokens are many."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram


class FrontMetrics:
    """All metrics of the front door, in a registry of its own choosing."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self.registry = registry
        self.clock = clock
        self.in_flight: set[Call] = set()
        labels = ("api",)
        self.requests = Counter(
            "headrace_requests", "Requests by their one outcome", ("api", "outcome"), registry=registry
        )
        self.ttft = Histogram(
            "headrace_ttft_seconds", "Arrival to first token", labels, buckets=_TTFT_S, registry=registry
        )
        self.itl = Histogram(
            "headrace_itl_seconds", "Gap between token events of a sample", labels, buckets=_ITL_S, registry=registry
        )
        self.e2e = Histogram(
            "headrace_e2e_seconds", "Arrival to last byte of a success", labels, buckets=_E2E_S, registry=registry
        )
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self.cached_tokens = Counter("headrace_cached_tokens", "Prompt tokens nobody computed", registry=registry)
        self.output_tokens = Counter("headrace_output_tokens", "Tokens delivered to answers", registry=registry)
        self.dropped_tokens = Counter("headrace_dropped_tokens", "Tokens behind a sample's end", registry=registry)
        gauge = Gauge("headrace_requests_in_flight", "Requests now being served", registry=registry)
        gauge.set_function(lambda: float(len(self.in_flight)))

        self._times: dict[str, ApiTimes] = {}

    def call(self, api: str) -> "Call":
        """Enter it when a request arrives."""
        times = self._times.get(api)
        if times is None:
            times = self._times[api] = ApiTimes(self.ttft.labels(api), self.itl.labels(api), self.e2e.labels(api))
        return Call(self, api, times)


class Call:
    """One request being measured."""

    def __init__(self, metrics: FrontMetrics, api: str, times: ApiTimes) -> None:
        self._metrics = metrics
        self._api = api
        self._times = times
        self._last: dict[int, float] = {}
        self.written = 0  # tokens of answers
        self.receipt = Receipt()
        self.started = metrics.clock.now()

    def __enter__(self) -> Self:
        self._metrics.in_flight.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        metrics = self._metrics
        metrics.in_flight.discard(self)
        outcome = outcome_of(error)
        metrics.requests.labels(self._api, outcome).inc()
        if outcome == "ok":
            self._times.e2e.observe(self.elapsed())

    def elapsed(self) -> float:
        """Seconds since arrival."""
        return self._metrics.clock.now() - self.started

    def tokens(self, index: int) -> None:
        """New tokens of sample `index` arrived."""
        now = self._metrics.clock.now()
        if not self._last:
            self._times.ttft.observe(now - self.started)
        elif index in self._last:
            self._times.itl.observe(now - self._last[index])
        self._last[index] = now

    def used(self, usage: Usage, dropped: int) -> None:
        """The token counts of an admitted request, however it ended."""
        self.written += usage.completion
        self._metrics.prompt_tokens.inc(usage.prompt)
        self._metrics.cached_tokens.inc(usage.cached)
        self._metrics.output_tokens.inc(usage.completion)
        self._metrics.dropped_tokens.inc(dropped)


class StatusCollector:
    """The numbers in the dispatcher's status as gauges `headrace_dispatcher_<key>`, the level below as label `name`."""

    def __init__(self, status: Callable[[], dict[str, object]]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for key, name, value in _numbers(self._status()):
            if key not in families:
                families[key] = GaugeMetricFamily(
                    "headrace_dispatcher_" + re.sub(r"\W", "_", key, flags=re.ASCII),
                    f"`{key}` of the dispatcher's status",
                    labels=["name"],
                )
            families[key].add_metric([name], value)
        yield from families.values()


def _numbers(status: dict[str, object]) -> Iterator[tuple[str, str, float]]:
    """(metric, name, value) of every number at `key`, `key.name` or `key.name.metric`; lists of dicts go by `name`."""
    for key, value in status.items():
        if isinstance(value, int | float):
            yield key, "", float(value)
        for name, inner in _named_parts(value):
            if isinstance(inner, int | float):
                yield key, name, float(inner)
            elif isinstance(inner, dict):
                yield from (
                    (f"{key}_{leaf}", name, float(n)) for leaf, n in inner.items() if isinstance(n, int | float)
                )


def _named_parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((str(name), inner) for name, inner in value.items())
    elif isinstance(value, list):
        yield from ((str(part.get("name", at)), part) for at, part in enumerate(value) if isinstance(part, dict))
