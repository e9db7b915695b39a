"""The OpenAI API over real HTTP, with the openai client unchanged, against a scripted dispatcher."""

import httpx
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionMessageParam

from cluster.core.config import RouterSettings
from cluster.core.errors import DeadlineExceeded, Overloaded, RequestFailed, Unavailable
from router.requests import TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, serve

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
PROMPT_TOKENS = len(b"user: hello\nassistant: ")
TEXT = "Paris 🗼, 你好"


async def test_chat_whole() -> None:
    async with serve(FakeDispatcher(say(TEXT))) as served, served.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    answer = raw.parse()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert raw.headers["x-headrace-prefill"] == "p0"
    assert raw.headers["x-headrace-decode"] == "d0"
    assert raw.headers["x-headrace-kv-bytes"] == "4096"
    assert raw.headers["x-headrace-cached-tokens"] == "16"
    assert raw.headers["x-headrace-timings-ms"] == "e2e=1.000"


async def test_chat_stream_with_usage() -> None:
    async with serve(FakeDispatcher(say(TEXT))) as served, served.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert all(delta.content for delta in deltas[1:-1])  # no empty deltas
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == PROMPT_TOKENS + len(TEXT.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_tells_its_timings_to_those_who_ask() -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with serve(FakeDispatcher(say(TEXT))) as served, httpx.AsyncClient(base_url=served.url) as client:
        asked = await client.post("/v1/completions", json=body, headers={"x-headrace-trace": "1"})
        plain = await client.post("/v1/completions", json=body)
        async with served.openai() as official:
            stream = await official.completions.create(
                model=MODEL, prompt="x", stream=True, extra_headers={"x-headrace-trace": "1"}
            )
            chunks = [chunk async for chunk in stream]
    comments = [line for line in asked.text.splitlines() if line.startswith(":")]
    assert ": x-headrace-timings-ms: e2e=1.000" in comments
    assert ": x-headrace-kv-bytes: 4096" in comments
    assert asked.text.endswith("\n\ndata: [DONE]\n\n")
    assert {answer.headers["x-headrace-decode"] for answer in (asked, plain)} == {"d0"}  # known with the first token
    assert not [line for line in plain.text.splitlines() if line.startswith(":")]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


@pytest.mark.parametrize("per_event", [1, 2, 7, 100])
@pytest.mark.parametrize("stop", [None, "你", ["s 🗼", ", x"], ["P"]])
async def test_streams_equal_whole_answers(per_event: int, stop: list[str] | str | None) -> None:
    dispatcher = FakeDispatcher(say(TEXT, per_event=per_event))
    async with serve(dispatcher) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="x", stop=stop)
        stream = await client.completions.create(
            model=MODEL, prompt="x", stop=stop, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    expected = TEXT if stop is None else min(TEXT.split(s)[0] for s in ([stop] if isinstance(stop, str) else stop))
    assert whole.choices[0].text == expected


@pytest.mark.parametrize(("stop", "told"), [("b", [0]), (None, [])])
async def test_the_worker_is_told_of_an_end_it_cannot_know(stop: str | None, told: list[int]) -> None:
    dispatcher = FakeDispatcher(say("abc"))
    async with serve(dispatcher) as served, served.openai() as client:
        await client.completions.create(model=MODEL, prompt="x", stop=stop)
    assert dispatcher.runs[0].stopped == told


async def test_stop_strings_hold_in_chat() -> None:
    async with serve(FakeDispatcher(say("abcde", per_event=2))) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, stop="cd")
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stop="cd", stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "ab"


async def test_no_usage_chunk_unless_asked_for() -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with serve(FakeDispatcher(say("ab"))) as served, httpx.AsyncClient() as client:
        response = await client.post(f"{served.url}/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_two_samples() -> None:
    dispatcher = FakeDispatcher(say("ab"))
    async with serve(dispatcher) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2, seed=7)
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2, seed=7, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts == ["ab", "ab"]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    assert dispatcher.requests[0].sampling.seed == 7


async def test_max_tokens_one() -> None:
    async with serve(FakeDispatcher(say("ab"))) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("a", "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 1


async def test_chat_logprobs_in_stream_and_whole() -> None:
    async with serve(FakeDispatcher(say("é你"))) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries == streamed
    assert entries is not None
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == "é你"
    assert [entry.token for entry in entries[:2]] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 5
    assert entries[0].top_logprobs[1].token == "z"


async def test_completion_logprobs_point_into_the_text() -> None:
    async with serve(FakeDispatcher(say("aé你b", per_event=3))) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="x", logprobs=1, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 1, 2, 2, 2, 3]
    assert logprobs.tokens is not None
    assert (logprobs.tokens[0], logprobs.tokens[-1]) == ("a", "b")
    assert logprobs.token_logprobs == [-0.5] * 7
    assert [offset for part in parts if part for offset in part.text_offset or []] == logprobs.text_offset


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after_s=2.5), 429, "overloaded"),
        (Unavailable("no pair"), 503, "unavailable"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (RequestFailed("broken"), 500, "request_failed"),
        (ZeroDivisionError("canary"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_before_the_first_token_are_statuses(
    error: Exception, status: int, code: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On admission and after it alike (I4)."""
    late = FakeDispatcher(lambda _: [error])
    early = FakeDispatcher(say("x"))
    early.refusal = error
    for dispatcher in (early, late):
        async with serve(dispatcher) as served, httpx.AsyncClient() as client:
            body = {"model": MODEL, "prompt": "canary", "stream": stream}
            response = await client.post(f"{served.url}/v1/completions", json=body)
            assert sum(served.outcomes("completions").values()) == 1
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
        assert "canary" not in response.text + caplog.text
        assert not dispatcher.active


async def test_an_error_in_mid_stream_is_an_event_without_done_and_a_cut_line() -> None:
    dispatcher = FakeDispatcher(lambda _: [TokenEvent(0, (65,)), RequestFailed("decode worker died")])
    received: list[bytes] = []

    async def read(response: httpx.Response) -> None:
        async for piece in response.aiter_raw():
            received.append(piece)

    async with serve(dispatcher) as served, httpx.AsyncClient() as client:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with client.stream("POST", f"{served.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await read(response)
    assert served.outcomes("completions") == {"failed": 1}
    text = b"".join(received)
    assert b'"text":"A"' in text
    assert b'"code":"request_failed"' in text
    assert b"[DONE]" not in text


async def test_an_error_in_mid_stream_reaches_the_openai_client() -> None:
    dispatcher = FakeDispatcher(lambda _: [TokenEvent(0, (65,)), RequestFailed("decode worker died")])
    async with serve(dispatcher) as served, served.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="decode worker died"):
            [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_off_is_no_success(stream: bool) -> None:
    dispatcher = FakeDispatcher(say("abc", end=False))
    async with serve(dispatcher) as served, served.openai() as client:
        with pytest.raises(openai.APIError, match="broke off"):
            await read_all(client, stream)
        assert served.outcomes("completions") == {"failed": 1}


async def read_all(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", stream=stream)
    if isinstance(answer, openai.AsyncStream):
        async for _ in answer:
            pass


async def test_client_errors_through_the_openai_client() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, served.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as empty:
            await client.completions.create(model=MODEL, prompt="")
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 20_000}])
        with pytest.raises(openai.BadRequestError) as penalty:
            await client.chat.completions.create(model=MODEL, messages=HELLO, presence_penalty=2.5)
        with pytest.raises(openai.BadRequestError) as internal:
            await client.completions.create(model=MODEL, prompt="x", extra_body={"kv_transfer_params": {}})
        assert served.outcomes("completions") == {"client_error": 3}
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert empty.value.param == "prompt"
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    assert (penalty.value.code, penalty.value.param) == ("invalid_value", "presence_penalty")
    assert internal.value.param == "kv_transfer_params"
    assert not dispatcher.requests


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_large(chunked: bool) -> None:
    body = orjson.dumps({"model": MODEL, "prompt": "x" * 10_000_000})

    async def pieces() -> object:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with serve(FakeDispatcher(say("x"))) as served, httpx.AsyncClient() as client:
        content = pieces() if chunked else body
        response = await client.post(f"{served.url}/v1/completions", content=content)  # type: ignore[arg-type]
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        small = await client.post(f"{served.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert small.status_code == 200


async def test_a_body_at_the_limit_is_read() -> None:
    body = orjson.dumps({"model": MODEL, "prompt": "x"})
    settings = RouterSettings(max_body_bytes=len(body))
    async with serve(FakeDispatcher(say("x")), settings) as served, httpx.AsyncClient(base_url=served.url) as client:
        assert (await client.post("/v1/completions", content=body)).status_code == 200
        assert (await client.post("/v1/completions", content=body + b" ")).status_code == 413


@pytest.mark.parametrize(
    ("given", "echoed"), [("mine-1", "mine-1"), ("x" * 129, None), ("", None), ("a b", None), (None, None)]
)
async def test_the_client_s_request_id_is_echoed_and_never_used(given: str | None, echoed: str | None) -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, httpx.AsyncClient() as client:
        headers = {} if given is None else {"x-request-id": given}
        body = {"model": MODEL, "prompt": "x"}
        responses = [await client.post(f"{served.url}/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert len({request.request_id for request in dispatcher.requests}) == 2
    for response in responses:
        shown = response.headers["x-request-id"]
        assert shown == echoed if echoed else shown.startswith("req-")
        assert dispatcher.requests[0].request_id not in response.text + str(response.headers)
