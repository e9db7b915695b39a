"""Spans by OpenTelemetry, sent over OTLP: the one file that knows it, loaded only where `tracing` is configured.

A call's own span starts when the call does, because its answer names it; all spans below it are made when it has ended
(spans.py). Whoever asks with a sampled trace of its own is traced; of the others `sample_share` are. Where parents are
not trusted, that share decides of all, and every call begins a trace of its own that links to its caller's: it is a
share of ids, and an id that a caller chooses would be a choice as well.
"""

import threading
from collections.abc import Mapping, Sequence

from grpc import Compression
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.core.clock import Clock
from cluster.core.config import TracingSettings
from router.front.spans import CallMarks, Part, parts_of
from router.front.tracing import Tracing
from router.records import Recorder, RequestRecord

CLOSE_S = 3.0
SEND_S = 2.0  # one batch, all its tries
SEND_EVERY_MS = 1000
_OURS = frozenset({"failed", "unavailable", "deadline"})  # outcomes that are an error of the system
_propagator = TraceContextTextMapPropagator()


def make_tracing(settings: TracingSettings, recorder: Recorder, clock: Clock, program: str) -> Tracing:
    """See tracing.py. Settings win over the environment; what none of them says (headers of the collector, its
    certificates, sizes of batches) the library takes from its own variables there, OTEL_*."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_share)),
        resource=Resource({SERVICE_NAME: "headrace", SERVICE_INSTANCE_ID: program}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=settings.insecure,
        timeout=SEND_S,
        compression=Compression.NoCompression,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS))
    return OtelTracing(provider, recorder, clock, trust_parent=settings.trust_parent)


class OtelTracing:
    """Implements Tracing. `close` gives up after `close_s`. `trust_parent`: see TracingSettings."""

    def __init__(
        self,
        provider: TracerProvider,
        recorder: Recorder,
        clock: Clock,
        *,
        trust_parent: bool = True,
        close_s: float = CLOSE_S,
    ) -> None:
        self._provider = provider
        self._trusts = trust_parent
        self._close_s = close_s
        self._tracer = provider.get_tracer("headrace")
        self._recorder = recorder
        self._clock = clock

    def start(self, api: str, carrier: Mapping[str, str]) -> "OtelSpan":
        parent, links = _propagator.extract(carrier, Context()), list[Link]()
        if not self._trusts:
            caller = trace.get_current_span(parent).get_span_context()
            parent, links = Context(), [Link(caller)] if caller.is_valid else []
        began = _ns(self._clock.wall())
        span = self._tracer.start_span(api, parent, SpanKind.SERVER, links=links, start_time=began)
        return OtelSpan(self._tracer, span, self._recorder, self._clock)

    def close(self) -> None:
        # The library's own bounds do not hold where a collector is silent: it ends every batch in turn. A thread that
        # is left behind so keeps no process from ending.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(self._close_s)


class OtelSpan:
    """Implements CallSpan."""

    def __init__(self, tracer: Tracer, span: Span, recorder: Recorder, clock: Clock) -> None:
        self._tracer = tracer
        self._span = span
        self._recorder = recorder
        self._clock = clock
        self._started = clock.now()
        self._offset = clock.wall() - self._started
        self._records: list[RequestRecord] = []

    def context(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier

    def named(self, public_id: str) -> None:
        self._span.set_attribute("headrace.request_id", public_id)

    def admitted(self, request_id: str) -> None:
        if self._span.is_recording():
            self._records += self._recorder.records(request_id)[:1]

    def end(self, outcome: str, first_token: float | None, attributes: Mapping[str, str | int | float]) -> None:
        ended = self._clock.now()
        if self._span.is_recording():
            marks = CallMarks(self._started, ended, first_token)
            self._emit(parts_of(marks, self._records), self._span)
            self._span.set_attributes({"headrace.outcome": outcome, **attributes})
            if outcome in _OURS:
                self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end(_ns(ended + self._offset))

    def _emit(self, parts: Sequence[Part], above: Span) -> None:
        context = trace.set_span_in_context(above, Context())
        for part in parts:
            start = _ns(part.start + self._offset)
            span = self._tracer.start_span(part.name, context, attributes=dict(part.attributes), start_time=start)
            self._emit(part.inside, span)
            span.end(_ns(part.end + self._offset))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
