"""What users feel, measured at the one place that sees all of it, and one outcome per request (FAULTS O07).

A `Call` is a context manager around everything that happens to one request, from its first byte to its last. However it
is left, it counts exactly one outcome. TTFT and ITL are those of token events as they reach the front door; TPOT is the
mean gap between the tokens of a sample, of those that ended in order. What the fleet tells is in fleet_metrics.py.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.core.clock import Clock
from cluster.core.durations import Durations
from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RateLimited, Unavailable
from router.front.histograms import DurationFamily
from router.front.recent import Recent
from router.front.tracing import CallSpan
from router.front.usage import Receipt, Usage
from router.requests import Trace

Outcome = Literal["ok", "client_error", "cancelled", "limited", "overloaded", "unavailable", "deadline", "failed"]
APIS = ("chat", "completions", "grpc")

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 2, 5)
_QUEUE_S = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_HANDOFF_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_PARTS = {
    "offer_wait": "offer_wait",
    "transfer_wire": "wire",
    "transfer_verify": "verify",
    "transfer_publish": "publish",
    "exposed_transfer": "exposed",
}
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)

_BY_API = (
    ("ttft", "Arrival to first token", _TTFT_S),
    ("itl", "Gap between token events of a sample", _ITL_S),
    ("tpot", "Mean gap between tokens of a sample", _ITL_S),
    ("e2e", "Arrival to last byte of a success", _E2E_S),
)


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

    ttft: Durations
    itl: Durations
    tpot: Durations
    e2e: Durations


class FrontMetrics:
    """All metrics of the front door, in a registry of its own choosing. `recent`: where the dashboard looks."""

    def __init__(self, registry: CollectorRegistry, clock: Clock, recent: Recent | None = None) -> None:
        self.recent = recent
        self.registry = registry
        self.clock = clock
        self.in_flight: set[Call] = set()
        self.requests = Counter(
            "headrace_requests", "Requests by their one outcome", ("api", "outcome"), registry=registry
        )
        by_api = [
            DurationFamily(f"headrace_{name}_seconds", told, ("api",), bounds, registry)
            for name, told, bounds in _BY_API
        ]
        self.timings = _timings(registry)
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self.cached_tokens = Counter("headrace_cached_tokens", "Prompt tokens nobody computed", registry=registry)
        self.output_tokens = Counter("headrace_output_tokens", "Tokens delivered to answers", registry=registry)
        self.dropped_tokens = Counter("headrace_dropped_tokens", "Tokens behind a sample's end", registry=registry)
        gauge = Gauge("headrace_requests_in_flight", "Requests now being served", registry=registry)
        gauge.set_function(lambda: float(len(self.in_flight)))
        # All of them from the start: a series that begins with its first failure has no rate to be warned by.
        self._times = {api: ApiTimes(*(family.labels(api) for family in by_api)) for api in APIS}
        self.by_outcome = {
            (api, outcome): self.requests.labels(api, outcome) for api in APIS for outcome in get_args(Outcome)
        }

    def call(self, api: str) -> "Call":
        """Enter it when a request arrives. `api`: one of APIS."""
        return Call(self, api, self._times[api])


def _timings(registry: CollectorRegistry) -> dict[str, Durations]:
    """What is observed of a trace's timings, by their names there."""
    queue = DurationFamily("headrace_queue_seconds", "Admission to first placement", (), _QUEUE_S, registry)
    told = "Parts of a request's first hand-off"
    parts = DurationFamily("headrace_handoff_seconds", told, ("part",), _HANDOFF_S, registry)
    return {"queue": queue.labels(), **{timing: parts.labels(part) for timing, part in _PARTS.items()}}


class Call:
    """One request being measured."""

    def __init__(self, metrics: FrontMetrics, api: str, times: ApiTimes) -> None:
        self._metrics = metrics
        self._api = api
        self._times = times
        self._first: dict[int, float] = {}  # token event, by sample
        self._last: dict[int, float] = {}
        self._traces: list[Trace] = []
        self.written = 0  # tokens of answers
        self.read = 0  # tokens of prompts
        self.span: CallSpan | None = None
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
        metrics.by_outcome[self._api, outcome].inc()
        now = metrics.clock.now()
        for trace in self._traces:
            trace.left = now
        if metrics.recent is not None:
            metrics.recent.ended(now, good=outcome in ("ok", "client_error", "cancelled", "limited"))
        if outcome == "ok":
            self._times.e2e.add(self.elapsed())
        if self.span is not None:
            tokens = {"gen_ai.usage.input_tokens": self.read, "gen_ai.usage.output_tokens": self.written}
            self.span.end(outcome, min(self._first.values(), default=None), tokens)

    def follow(self, trace: Trace) -> None:
        """A request of this call was admitted: its trace gets the marks of the front door."""
        trace.arrived = self.started
        self._traces.append(trace)

    def elapsed(self) -> float:
        """Seconds since arrival."""
        return self._metrics.clock.now() - self.started

    def tokens(self, index: int) -> None:
        """New tokens of sample `index` arrived."""
        now, recent = self._metrics.clock.now(), self._metrics.recent
        last = self._last.get(index)
        if last is not None:
            self._times.itl.add(now - last)
            if recent is not None:
                recent.itl.add(now, now - last)
        else:
            if not self._last:
                self._times.ttft.add(now - self.started)
                if recent is not None:
                    recent.ttft.add(now, now - self.started)
            self._first[index] = now
        self._last[index] = now

    def ended(self, samples: Iterable[tuple[int, int]]) -> None:
        """These samples have ended in order: (index, tokens) of each."""
        for index, tokens in samples:
            if tokens > 1 and index in self._first:
                self._times.tpot.add((self._last[index] - self._first[index]) / (tokens - 1))

    def used(self, usage: Usage, dropped: int, trace: Trace) -> None:
        """What an admitted request came to, however it ended."""
        for name, milliseconds in trace.timings_ms.items():
            if (durations := self._metrics.timings.get(name)) is not None:
                durations.add(milliseconds / 1000)
        self.written += usage.completion
        self.read += usage.prompt
        if self._metrics.recent is not None:
            self._metrics.recent.used(self._metrics.clock.now(), usage.prompt, usage.cached, usage.completion)
        self._metrics.prompt_tokens.inc(usage.prompt)
        self._metrics.output_tokens.inc(usage.completion)
        if usage.cached:
            self._metrics.cached_tokens.inc(usage.cached)
        if dropped:
            self._metrics.dropped_tokens.inc(dropped)
