"""A collector for tests: an OTLP trace service over real gRPC that keeps what it was sent."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Receiver(TraceServiceServicer):
    """Spans in the order of their arrival."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.came.set()
        return ExportTraceServiceResponse()

    def root(self) -> Span:
        """The one span of a call."""
        (found,) = (span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER)
        return found

    def below(self, above: Span) -> list[Span]:
        """Its children, by their start."""
        inside = [span for span in self.spans if span.parent_span_id == above.span_id]
        return sorted(inside, key=lambda span: span.start_time_unix_nano)


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
