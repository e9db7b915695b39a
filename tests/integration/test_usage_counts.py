"""What is counted is what was handed to clients: streamed or whole, several samples and prompts, cut at any point."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

import grpc
import grpc.aio
import httpx
import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import Overloaded, RequestFailed
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from cluster.usage import LocalUsage, Sums, Who, day_of, iso
from router.front.door import FrontDoor
from router.front.grpc_service import InferenceService
from router.front.model_text import ModelText
from router.front.text import Delta
from router.front.usage import Receipt
from router.ledger import Ledger
from router.requests import TokenEvent, TokenLogprob, Trace
from tests.fakes.dispatcher import Step, say
from tests.integration.counting import CACHED, LARGE, PATH, PATIENCE_S, PROMPT, ask, counting
from tests.integration.front_door_server import MODEL, Served
from tests.integration.stack import connect, post_bytes

if TYPE_CHECKING:
    from cluster.stubs.inference_pb2_grpc import InferenceAsyncStub


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_sums_are_what_the_answer_says(stream: bool, n: int, shared: bool) -> None:
    async with counting(say("Fünf Fuß 🏞", per_event=3), shared=shared) as (_, client, book):
        texts, usage = await ask(client, stream=stream, n=n)
        here = await book.sums() if shared else None
    assert texts == ["Fünf Fuß 🏞"] * n
    expected = Sums(1, usage["prompt_tokens"], CACHED, usage["completion_tokens"], len(PROMPT), sum(map(len, texts)))
    assert await book.sums() == expected
    assert here in (expected, None), "a shared book has it before the client has the end"


async def test_several_prompts_are_one_request_and_an_echo_is_not_written() -> None:
    prompts = [PROMPT, "short", "a third one"]
    async with counting(say("abc")) as (_, client, book):
        texts, usage = await ask(client, prompt=prompts, n=2, echo=True)
    assert texts == [prompt + "abc" for prompt in prompts for _ in range(2)]
    characters = len("".join(prompts))
    cached = sum(min(CACHED, len(prompt)) for prompt in prompts)
    assert await book.sums() == Sums(1, usage["prompt_tokens"], cached, usage["completion_tokens"], characters, 18)


async def test_ids_count_by_the_text_they_stand_for_and_messages_by_what_they_say() -> None:
    async with counting(say("ok")) as (_, client, book):
        await ask(client, prompt=list("Grüße".encode()))
        first = await book.sums()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "你好"}]}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert first == Sums(1, 7, 7, 3, 5, 2)
    both = await book.sums()
    assert (both.input_characters, both.output_characters) == (7, 4)
    assert both.input_tokens == 7 + usage["prompt_tokens"]


class Watched(ModelText):
    """Says when it makes text of ids, and in which thread."""

    made: ClassVar[list[threading.Thread]] = []

    def text_of(self, ids: Sequence[int], *, special: bool) -> str:
        self.made.append(threading.current_thread())
        return super().text_of(ids, special=special)


def watched(front: FrontDoor) -> list[threading.Thread]:
    """The threads in which text is made of ids from now on."""
    text = front.text
    front.text = Watched(**{each.name: getattr(text, each.name) for each in fields(text)})
    Watched.made.clear()
    return Watched.made


@pytest.mark.parametrize("stream", [True, False])
async def test_of_a_long_prompt_of_ids_characters_are_counted_beside_its_answer(stream: bool) -> None:
    ids = list(("ü" * 600).encode())
    async with counting(say("abc"), limits=LARGE) as (served, client, book):
        made = watched(served.front)
        await ask(client, prompt=ids, stream=stream)
        assert await book.sums() == Sums(1, 1200, CACHED, 4, 600, 3), "in the book before the client has the end"
    assert [thread is threading.main_thread() for thread in made] == [False]


async def test_nobody_counts_characters_of_what_is_not_answered() -> None:
    """No refusal waits for it, and no first token."""
    forever = asyncio.Event()
    async with counting(lambda _: [forever], limits=LARGE) as (served, client, book):
        made = watched(served.front)
        served.dispatcher.refusal = Overloaded("full", retry_after_s=1.0)
        for prompt in ([65], [65] * 1200):
            assert (await client.post(PATH, json={"model": MODEL, "prompt": prompt})).status_code == 429
        served.dispatcher.refusal = None
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(
                post_bytes(PATH, json.dumps({"model": MODEL, "prompt": [65], "stream": True}).encode())
            )
            await served.dispatcher.until_active(1)
            connection.leave()
            await served.dispatcher.until_active(0)
    assert made == []
    assert await book.sums() == Sums()


async def test_whose_client_left_while_its_prompt_was_counted_is_charged_for_it() -> None:
    told: list[Sums] = []
    counting_it, receipt = threading.Event(), Receipt(told.append)

    def characters() -> int:
        counting_it.wait()
        return 600

    receipt.opened(0, 1, tokens=1200, characters=characters, trace=Trace(cached_tokens=7))
    receipt.hold(Delta(0, "A", (65,)))
    receipt.handed(0)
    receipt.close()
    assert told == [Sums(1, 1200, 7, 1, 0, 1)]
    counting_it.set()
    await receipt.known()
    assert told[1:] == [Sums(input_characters=600)]


async def test_a_prompt_that_was_only_read_counts() -> None:
    async with counting(say("")) as (_, client, book):
        await ask(client, max_tokens=0, echo=True)
    assert await book.sums() == Sums(1, len(PROMPT), CACHED, 0, len(PROMPT), 0)


@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_who_leaves_a_stream_is_charged_for_what_was_handed_over(tokens: int) -> None:
    forever = asyncio.Event()
    steps: list[Step] = [*[TokenEvent(0, (65,))] * tokens, forever]
    async with (
        counting(lambda _: steps) as (served, _, book),
        connect(served.url) as connection,
        asyncio.timeout(PATIENCE_S),
    ):
        await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()))
        await served.dispatcher.until_active(1)
        while connection.received.count(b'"text":"A"') < tokens:
            await connection.receive(len(connection.received) + 1)
        connection.leave()
        await served.dispatcher.until_active(0)
    assert await book.sums() == (Sums(1, 1, 1, tokens, 1, tokens) if tokens else Sums())


@asynccontextmanager
async def grpc_door(served: Served) -> AsyncIterator["InferenceAsyncStub"]:
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceService(served.front), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield InferenceStub(channel)
    await server.stop(None)


@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_who_leaves_a_call_is_charged_for_what_was_handed_over(tokens: int) -> None:
    """Over gRPC, the same as over HTTP."""
    forever = asyncio.Event()
    steps: list[Step] = [*[TokenEvent(0, (65,))] * tokens, forever]
    async with (
        counting(lambda _: steps) as (served, _, book),
        grpc_door(served) as stub,
        asyncio.timeout(PATIENCE_S),
    ):
        call = stub.Generate(pb.GenerateRequest(model=MODEL, prompt="x"))
        await served.dispatcher.until_active(1)
        for _ in range(tokens):
            response = await call.read()
            assert isinstance(response, pb.GenerateResponse)
            assert response.delta.text == "A"
        call.cancel()
        await served.dispatcher.until_active(0)
    assert await book.sums() == (Sums(1, 1, 1, tokens, 1, tokens) if tokens else Sums())


async def test_what_grpc_was_given_when_its_client_left_is_charged_for() -> None:
    """A client that reads one message and no more: the others fill what lies between, until one of them waits."""
    likely = TokenLogprob(-0.5, tuple((token, -1.0) for token in range(20)))
    steps: list[Step] = [TokenEvent(0, (65,), (likely,))] * 3000
    async with (
        counting(lambda _: steps, limits=LARGE) as (served, _, book),
        grpc_door(served) as stub,
        asyncio.timeout(PATIENCE_S),
    ):
        call = stub.Generate(pb.GenerateRequest(model=MODEL, prompt="x", logprobs=20))
        await call.read()
        call.cancel()
        await served.dispatcher.until_active(0)
        written = served.front.metrics.registry.get_sample_value("headrace_output_tokens_total")
    charged = (await book.sums()).output_tokens
    assert written is not None
    assert 1 <= charged == written < 3000


async def test_who_leaves_before_a_whole_answer_got_nothing() -> None:
    forever = asyncio.Event()
    async with counting(lambda _: [TokenEvent(0, (65, 66)), forever]) as (served, _, book):
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x"}).encode()))
            await served.dispatcher.until_active(1)
            connection.leave()
            await served.dispatcher.until_active(0)
        written = served.front.metrics.registry.get_sample_value("headrace_output_tokens_total")
    assert await book.sums() == Sums()
    assert written == 2, "the work is in other metrics"


async def test_a_stream_that_breaks_counts_until_there_and_what_was_refused_does_not() -> None:
    steps: list[Step] = [TokenEvent(0, (65, 66)), RequestFailed("a worker is gone")]
    async with counting(lambda _: steps) as (served, client, book):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(PATH, json=body)
        served.dispatcher.refusal = Overloaded("full", retry_after_s=1.0)
        assert (await client.post(PATH, json=body)).status_code == 429
        assert (await client.post(PATH, json={**body, "n": 0})).status_code == 400
    assert await book.sums() == Sums(1, len(PROMPT), CACHED, 2, len(PROMPT), 2)


async def test_text_that_is_held_back_is_not_handed_over_until_it_shows() -> None:
    """Half a character, and the start of what may be a stop string."""
    forever = asyncio.Event()
    half = "é".encode()[:1]
    steps: list[Step] = [TokenEvent(0, (65,)), TokenEvent(0, tuple(half)), forever]
    async with (
        counting(lambda _: steps) as (served, _, book),
        connect(served.url) as connection,
        asyncio.timeout(PATIENCE_S),
    ):
        await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()))
        await connection.receive(1)
        while b'"text":"A"' not in connection.received:
            await connection.receive(len(connection.received) + 1)
        connection.leave()
        await served.dispatcher.until_active(0)
    assert (await book.sums()).output_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_no_client_has_the_end_before_the_book_has_the_request(stream: bool) -> None:
    """The last byte waits. A client that has it is in the book, whatever becomes of this router."""
    async with counting(say("abc")) as (served, _, book):
        book.hold = asyncio.Event()
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            body = {"model": MODEL, "prompt": "x", "stream": stream}
            await connection.send(post_bytes(PATH, json.dumps(body).encode()))
            await book.asked.wait()
            while b"abc"[-1:] not in connection.received or (not stream and b'"usage"' not in connection.received):
                await connection.receive(len(connection.received) + 1)
            assert b"[DONE]" not in connection.received
            book.hold.set()
            answer = await connection.answer()
            here = await book.sums()
        assert answer.whole
        assert here.requests == 1
        if not stream:
            assert answer.json["usage"]["completion_tokens"] == 4


async def test_an_answer_over_midnight_counts_on_the_days_it_was_handed_over() -> None:
    clock = ManualClock()
    today = day_of(clock.wall())
    book = LocalUsage(lambda: day_of(clock.wall()))
    ledger = Ledger(clock, book, epoch=1)
    who = Who("", MODEL)
    ledger.add(who, Sums(1, 10, 0, 3, 10, 3))
    clock.advance(86_400.0)
    ledger.add(who, Sums(output_tokens=2))
    assert await ledger.read(today, today + 1) == {
        today: {who: Sums(1, 10, 0, 3, 10, 3)},
        today + 1: {who: Sums(output_tokens=2)},
    }
    assert iso(today) == "2023-11-14"
