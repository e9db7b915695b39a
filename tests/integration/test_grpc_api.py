"""The public gRPC API against a scripted dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest

from cluster.core.config import RouterSettings
from cluster.core.errors import BrokenOff, DeadlineExceeded, Overloaded, RequestFailed, Unavailable
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from router.front.door import FrontDoor
from router.front.grpc_service import InferenceService
from router.requests import TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, make_front, outcomes

if TYPE_CHECKING:
    from cluster.stubs.inference_pb2_grpc import InferenceAsyncStub

PATIENCE_S = 10
HELLO = pb.GenerateRequest(prompt="hello")


@asynccontextmanager
async def serve(
    dispatcher: FakeDispatcher, settings: RouterSettings | None = None
) -> AsyncIterator[tuple[InferenceAsyncStub, FrontDoor]]:
    front = make_front(dispatcher, settings)
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceService(front), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield InferenceStub(channel), front
    finally:
        await server.stop(grace=PATIENCE_S)


@dataclass
class Received:
    """A stream, joined."""

    texts: list[str]
    ids: list[list[int]]
    logprobs: list[pb.Logprob]
    finishes: dict[int, str]
    summary: pb.Summary


async def receive(stub: InferenceAsyncStub, request: pb.GenerateRequest) -> Received:
    n = max(1, request.n)
    got = Received([""] * n, [[] for _ in range(n)], [], {}, pb.Summary())
    async for message in stub.Generate(request, timeout=PATIENCE_S):
        assert not got.summary.model, "the summary is the last message"
        match message.WhichOneof("event"):
            case "delta":
                assert message.delta.index not in got.finishes
                got.texts[message.delta.index] += message.delta.text
                got.ids[message.delta.index] += message.delta.token_ids
                got.logprobs += message.delta.logprobs
            case "finish":
                got.finishes[message.finish.index] = message.finish.reason
            case "summary":
                assert len(got.finishes) == n
                got.summary = message.summary
    return got


async def test_text() -> None:
    dispatcher = FakeDispatcher(say("Paris 🗼"))
    async with serve(dispatcher) as (stub, _):
        got = await receive(stub, pb.GenerateRequest(prompt="hello", request_id="mine", seed=2**64 - 1))
    text = "Paris 🗼".encode()
    assert got.texts == ["Paris 🗼"]
    assert got.ids == [[*text, 1023]]
    assert got.finishes == {0: "stop"}
    assert got.summary == pb.Summary(
        request_id="mine",
        model=MODEL,
        prompt_tokens=5,
        completion_tokens=len(text) + 1,
        cached_tokens=16,
        prefill_worker="p0",
        decode_worker="d0",
        kv_bytes=4096,
        attempts=1,
        timings_ms={"e2e": 1.0},
    )
    assert dispatcher.requests[0].sampling.seed == 2**64 - 1


async def test_token_ids_and_chat() -> None:
    dispatcher = FakeDispatcher(say("ok"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    async with serve(dispatcher) as (stub, _):
        await receive(stub, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])))
        await receive(stub, pb.GenerateRequest(chat=chat, model=MODEL))
    assert dispatcher.requests[0].prompt == (1, 2, 3)
    assert bytes(dispatcher.requests[1].prompt) == b"user: hi\nassistant: "


async def test_samples_stop_strings_and_logprobs() -> None:
    dispatcher = FakeDispatcher(say("abcXYd"))
    request = pb.GenerateRequest(prompt="x", n=2, stop=["XY"], logprobs=1)
    async with serve(dispatcher) as (stub, _):
        got = await receive(stub, request)
    assert got.texts == ["abc", "abc"]
    assert got.ids == [list(b"abcXY")] * 2
    assert got.finishes == {0: "stop", 1: "stop"}
    assert dispatcher.runs[0].stopped == [0, 1]
    assert got.summary.completion_tokens == 10
    assert [(entry.token, entry.token_id) for entry in got.logprobs[:3]] == [(b"a", 97), (b"a", 97), (b"b", 98)]
    assert [alternative.token for alternative in got.logprobs[0].top] == [b"a", b"z"]
    assert len(got.logprobs) == 10


async def test_stop_strings_hold_for_token_ids_too() -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), stop=["bc"])
    async with serve(FakeDispatcher(say("abcd"))) as (stub, _):
        got = await receive(stub, request)
    assert (got.texts, got.ids, got.finishes) == (["a"], [list(b"abc")], {0: "stop"})


async def test_models() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as (stub, _):
        known = await stub.ListModels(pb.ListModelsRequest())
        dispatcher.available = False
        unknown = await stub.ListModels(pb.ListModelsRequest())
    assert list(known.models) == [pb.Model(id=MODEL, max_context=512)]
    assert list(unknown.models) == [pb.Model(id=MODEL)]


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(prompt=""), "prompt"),
        (pb.GenerateRequest(prompt="x" * 600), "context"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1024])), "token_ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x")])), r"chat\.messages\[0\]\.role"),
        (pb.GenerateRequest(prompt="x", temperature=float("nan")), "temperature"),
        (pb.GenerateRequest(prompt="x", temperature=float("inf")), "temperature"),
        (pb.GenerateRequest(prompt="x", top_p=0), "top_p"),
        (pb.GenerateRequest(prompt="x", top_k=-2), "top_k"),
        (pb.GenerateRequest(prompt="x", max_tokens=0), "max_tokens"),
        (pb.GenerateRequest(prompt="x", n=0), "n must"),
        (pb.GenerateRequest(prompt="x", n=10_000), "n must"),
        (pb.GenerateRequest(prompt="x", logprobs=21), "logprobs"),
        (pb.GenerateRequest(prompt="x", stop=[""]), "stop"),
        (pb.GenerateRequest(prompt="x", stop_token_ids=[-5]), "stop_token_ids"),
        (pb.GenerateRequest(prompt="x" * 2000), "larger"),
    ],
)
async def test_invalid_arguments_name_the_field(request_: pb.GenerateRequest, word: str) -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher, RouterSettings(max_body_bytes=1500)) as (stub, front):
        with pytest.raises(grpc.aio.AioRpcError, match=word) as caught:
            await receive(stub, request_)
        assert outcomes(front, "grpc") == {"client_error": 1}
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not dispatcher.requests


async def test_another_model() -> None:
    async with serve(FakeDispatcher(say("x"))) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(stub, pb.GenerateRequest(prompt="x", model="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (Overloaded("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
        (Unavailable("no pair"), grpc.StatusCode.UNAVAILABLE, "unavailable"),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
        (RequestFailed("broken"), grpc.StatusCode.INTERNAL, "failed"),
        (ZeroDivisionError("canary"), grpc.StatusCode.INTERNAL, "failed"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1])
async def test_errors(
    error: Exception, code: grpc.StatusCode, outcome: str, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = FakeDispatcher(lambda _: [*[TokenEvent(0, (65,))] * tokens, error])
    async with serve(dispatcher) as (stub, front):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(stub, HELLO)
        assert outcomes(front, "grpc") == {outcome: 1}
    assert caught.value.code() == code
    assert "canary" not in f"{caught.value.details()}{caplog.text}"
    retry = [value for key, value in caught.value.trailing_metadata() if key == "retry-after"]  # type: ignore[misc, has-type]
    assert retry == {"overloaded": ["2.5"], "unavailable": ["1"]}.get(outcome, [])
    assert not dispatcher.active


@pytest.mark.parametrize("tokens", [0, 2])
async def test_cancelling_cancels(tokens: int) -> None:
    dispatcher = FakeDispatcher(lambda _: [*[TokenEvent(0, (65,))] * tokens, asyncio.Event()])
    async with serve(dispatcher) as (stub, front), asyncio.timeout(PATIENCE_S):
        call = stub.Generate(HELLO)
        await dispatcher.until_active(1)
        if tokens:
            await call.read()
        call.cancel()
        await dispatcher.until_active(0)
    assert outcomes(front, "grpc") == {"cancelled": 1}


async def test_the_client_s_deadline_is_the_request_s() -> None:
    dispatcher = FakeDispatcher(lambda _: [asyncio.Event()])
    async with serve(dispatcher) as (stub, front), asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(HELLO, timeout=0.3).read()
        await dispatcher.until_active(0)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < dispatcher.requests[0].deadline_s < 0.35  # gRPC rounds on its way
    assert outcomes(front, "grpc") == {"deadline": 1}


async def test_without_a_client_s_deadline_the_configured_one_holds() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher, RouterSettings(deadline_s=50)) as (stub, _):
        async for _message in stub.Generate(HELLO):
            pass
    assert 49 < dispatcher.requests[0].deadline_s <= 50


@pytest.mark.parametrize(("tokens", "code"), [(0, grpc.StatusCode.UNAVAILABLE), (1, grpc.StatusCode.INTERNAL)])
async def test_what_breaks_off_before_its_client_has_anything_can_be_asked_for_again(
    tokens: int, code: grpc.StatusCode
) -> None:
    dispatcher = FakeDispatcher(lambda _: [*[TokenEvent(0, (65,))] * tokens, BrokenOff("nobody is ready")])
    async with serve(dispatcher) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="nobody is ready") as caught:
            await receive(stub, HELLO)
    assert caught.value.code() == code
    told = dict(cast("list[tuple[str, str]]", caught.value.trailing_metadata()))
    assert ("retry-after" in told) == (not tokens)


async def test_the_trailer_says_what_happened() -> None:
    """Also of a call that failed; a client's id is made ASCII, as metadata must be."""
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as (stub, _):
        call = stub.Generate(pb.GenerateRequest(prompt="hello", request_id="frag-ü"), timeout=PATIENCE_S)
        assert [message async for message in call]
        trailer = dict(await call.trailing_metadata() or ())
        dispatcher.script = lambda _: [TokenEvent(0, (65,)), RequestFailed("gone")]
        broken = stub.Generate(HELLO, timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            [message async for message in broken]
    assert trailer["x-request-id"] == "frag-?"
    assert (trailer["x-headrace-prefill"], trailer["x-headrace-decode"]) == ("p0", "d0")
    assert (trailer["x-headrace-cached-tokens"], trailer["x-headrace-kv-bytes"]) == ("16", "4096")
    assert trailer["x-headrace-timings-ms"] == "e2e=1.000"
    told = dict(cast("list[tuple[str, str]]", failed.value.trailing_metadata()))
    assert told["x-request-id"].startswith("req-")
    assert told["x-headrace-decode"] == "d0"


@pytest.mark.parametrize("given", ["a\nERROR forged", "x\x00", "\u202egnp.exe", "tab\t", " "])
async def test_an_id_that_could_forge_a_line_or_break_a_trailer_is_not_taken(given: str) -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as (stub, _):
        call = stub.Generate(pb.GenerateRequest(prompt="hello", request_id=given), timeout=PATIENCE_S)
        summary = [message async for message in call][-1].summary
        trailer = dict(await call.trailing_metadata() or ())
    assert summary.request_id == trailer["x-request-id"] == dispatcher.requests[0].public_id
    assert summary.request_id.startswith("req-")
