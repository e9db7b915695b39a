"""Spans over OTLP to a real receiver, W3C context in and out over HTTP and gRPC; off, nothing is loaded."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from cluster.core.clock import SystemClock
from cluster.core.config import TracingSettings
from cluster.core.errors import ConfigError
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from router.front.door import FrontDoor
from router.front.grpc_service import InferenceService
from router.front.otel import OtelTracing
from router.front.tracing import open_tracing
from router.records import record_of
from router.requests import Request, Running
from tests.architecture.source import ROOT
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, make_front, serve
from tests.otlp_receiver import Receiver, receiving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


def traced(front: FrontDoor, dispatcher: FakeDispatcher, receiver: Receiver, share: float = 0.0) -> None:
    """Turn tracing on; only those who bring a sampled trace are traced, unless `share` says otherwise."""
    settings = TracingSettings(otlp_endpoint=f"127.0.0.1:{receiver.port}", insecure=True, sample_share=share)
    front.tracing = open_tracing(settings, dispatcher, SystemClock(), "router-0")


async def close(front: FrontDoor) -> None:
    assert front.tracing is not None
    await asyncio.to_thread(front.tracing.close)


def check_call(receiver: Receiver, traceparent: str, api: str, public_id: str) -> None:
    root = receiver.root()
    assert (root.name, root.trace_id.hex(), root.parent_span_id.hex()) == (api, TRACE, PARENT)
    assert traceparent == f"00-{TRACE}-{root.span_id.hex()}-01", "the answer names the call's span"
    assert [span.name for span in receiver.below(root)] == ["parse", "text"], "the fake keeps no record of requests"
    told = {item.key: item.value for item in root.attributes}
    assert told["headrace.outcome"].string_value == "ok"
    assert told["headrace.request_id"].string_value == public_id, "log lines and `headrace explain` are found by it"
    assert (told["gen_ai.usage.input_tokens"].int_value, told["gen_ai.usage.output_tokens"].int_value) == (5, 3)
    assert root.start_time_unix_nano < root.end_time_unix_nano
    assert b"hello" not in b"".join(span.SerializeToString() for span in receiver.spans)


async def test_over_http() -> None:
    dispatcher = FakeDispatcher(say("abc"))
    with receiving() as receiver:
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            traced(served.front, dispatcher, receiver)
            answer = await client.post(
                "/v1/completions", json=BODY, headers={"traceparent": SAMPLED, "x-request-id": "theirs-7"}
            )
            for headers in ({"traceparent": UNSAMPLED}, {"traceparent": "00-nonsense"}, {}):
                assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
            await close(served.front)
        check_call(receiver, answer.headers["traceparent"], "completions", "theirs-7")


async def test_over_grpc() -> None:
    dispatcher = FakeDispatcher(say("abc"))
    front = make_front(dispatcher)
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceService(front), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with receiving() as receiver:
        traced(front, dispatcher, receiver)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            message = pb.GenerateRequest(model=MODEL, prompt="hello", max_tokens=3)
            call = InferenceStub(channel).Generate(message, metadata=(("traceparent", SAMPLED),))
            assert [response async for response in call]
            trailer = {str(name): str(value) for name, value in await call.trailing_metadata()}
        await server.stop(None)
        await close(front)
        check_call(receiver, trailer["traceparent"], "grpc", trailer["x-request-id"])


@pytest.mark.parametrize(
    "parents",
    [
        ["00-nonsense"],
        [SAMPLED.upper()],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"{SAMPLED}-more"],
        ["x" * 5000],
        [UNSAMPLED, SAMPLED],
    ],
)
async def test_a_parent_that_is_none_or_two_begins_a_trace_of_our_own(parents: list[str]) -> None:
    """W3C Trace Context, 3.2: over both doors, and no call is the worse for it."""
    dispatcher = FakeDispatcher(say("abc"))
    server = grpc.aio.server()
    with receiving() as receiver:
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            traced(served.front, dispatcher, receiver)
            headers = [("traceparent", parent) for parent in parents]
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            add_InferenceServicer_to_server(InferenceService(served.front), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                message = pb.GenerateRequest(model=MODEL, prompt="hello", max_tokens=3)
                call = InferenceStub(channel).Generate(message, metadata=headers)
                assert [response async for response in call]
                trailer = {str(name): str(value) for name, value in await call.trailing_metadata()}
            await server.stop(None)
            await close(served.front)
    assert answer.status_code == 200
    # Of two over gRPC its library hands on the last alone: nobody behind it can know that there were more.
    judged = [answer.headers["traceparent"], trailer["traceparent"]][: 2 if len(parents) == 1 else 1]
    for ours in judged:
        assert TRACE not in ours
        assert not int(ours[-2:], 16) & 1, "nobody asked for it to be recorded"


async def test_a_state_that_came_in_several_headers_is_handed_on_whole() -> None:
    dispatcher = FakeDispatcher(say("abc"))
    with receiving() as receiver:
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            traced(served.front, dispatcher, receiver)
            headers = [("traceparent", UNSAMPLED), ("tracestate", "one=1"), ("tracestate", "two=2")]
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            await close(served.front)
    assert answer.headers["tracestate"] == "one=1,two=2"


async def test_a_failure_is_an_error_of_the_span_and_all_are_sampled_where_that_is_wanted() -> None:
    dispatcher = FakeDispatcher(say("abc"))
    dispatcher.available = False
    with receiving() as receiver:
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            traced(served.front, dispatcher, receiver, share=1.0)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 503
            await close(served.front)
        assert receiver.root().status.code == Status.STATUS_CODE_ERROR
        assert [span.name for span in receiver.below(receiver.root())] == ["parse"]
        assert receiver.root().kind == Span.SPAN_KIND_SERVER


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_public_door_decides_itself_what_is_recorded(share: float) -> None:
    """Whatever its caller wishes; the caller's trace is found by a link."""
    dispatcher = FakeDispatcher(say("abc"))
    with receiving() as receiver:
        settings = TracingSettings(
            otlp_endpoint=f"127.0.0.1:{receiver.port}", insecure=True, sample_share=share, trust_parent=False
        )
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            served.front.tracing = open_tracing(settings, dispatcher, SystemClock(), "router-0")
            low = f"00-{'0' * 31}1-{PARENT}-01"  # a share of ids would have this one
            answers = [await client.post("/v1/completions", json=BODY, headers={"traceparent": SAMPLED})]
            if not share:
                answers.append(await client.post("/v1/completions", json=BODY, headers={"traceparent": low}))
            await close(served.front)
        for answer in answers:
            _, trace_id, _, flags = answer.headers["traceparent"].split("-")
            assert trace_id not in (TRACE, low.split("-")[1])
            assert bool(int(flags, 16) & 1) is bool(share)
        if not share:
            assert not receiver.spans
            return
        root = receiver.root()
        assert not root.parent_span_id
        (link,) = root.links
        assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE, PARENT)


class Forgetful(FakeDispatcher):
    """Knows a request while it runs, and no longer."""

    @asynccontextmanager
    async def run(self, request: Request) -> AsyncIterator[Running]:
        async with super().run(request) as running:
            self.known = [record_of(request, running.trace, SystemClock().now())]
            yield running
        self.known[0].ended("ok", SystemClock().now())
        self.known = []


async def test_a_request_that_nobody_remembers_when_its_call_ends_has_its_spans() -> None:
    dispatcher = Forgetful(say("abc"))
    with receiving() as receiver:
        async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
            traced(served.front, dispatcher, receiver, share=1.0)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            await close(served.front)
        parts = receiver.below(receiver.root())
        assert [span.name for span in parts] == ["parse", "queue", "text"]
        assert parts[0].end_time_unix_nano == parts[1].start_time_unix_nano, "parsed until it was admitted"


async def test_without_a_collector_requests_are_answered() -> None:
    dispatcher = FakeDispatcher(say("abc"))
    with receiving() as receiver:
        gone = receiver.port
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
        traced(served.front, dispatcher, Receiver(port=gone), share=1.0)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        await close(served.front)


class Silent(SpanExporter):
    """A collector that takes what it is sent and says nothing, until it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.let_go.wait()
        return SpanExportResult.SUCCESS


async def test_a_collector_that_never_answers_holds_up_nobody_s_exit() -> None:
    exporter, provider, dispatcher = Silent(), TracerProvider(shutdown_on_exit=False), FakeDispatcher(say("abc"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
        served.front.tracing = OtelTracing(provider, dispatcher, SystemClock(), close_s=0.1)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        await close(served.front)  # without its bound this waits for ever
    assert await asyncio.to_thread(exporter.asked.wait, 10.0), "what is left is sent"
    exporter.let_go.set()


async def test_what_settings_say_the_environment_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none that there is")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "no number")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "false")
    await test_over_http()


def test_off_nothing_of_it_is_loaded() -> None:
    """Of its own; Ray's and Redis' clients bring OpenTelemetry's API along."""
    script = (
        "import sys\n"
        "import router.server\n"
        "from cluster.core.config import TracingSettings\n"
        "assert router.server.open_tracing(TracingSettings(), None, None, '') is None\n"
        "print(*sorted(sys.modules.keys() & {'router.front.otel', 'opentelemetry.sdk', 'opentelemetry.exporter'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "router.front.otel", raising=False)
    with pytest.raises(ConfigError, match=r"headrace\[tracing\]"):
        open_tracing(TracingSettings(otlp_endpoint="collector:4317"), FakeDispatcher(say("x")), SystemClock(), "r")
