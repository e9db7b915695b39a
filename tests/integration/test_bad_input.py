"""Bad input at the front door of the real stack: a clear 4xx naming the field, and nobody is hurt (C29, C30, C37, S07).

After every case a normal request must succeed, and at the end every process must be the one it was.
"""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from router.front.unsupported import INTERNAL
from tests.integration.asks import EOS, Ask, End, ask_http
from tests.integration.stack import CLOCK, MODEL, HttpAnswer, Stack, config, connect, post_bytes, request_head, stack

TEN_MB = 10 * 1024 * 1024
WITHIN_S = 1.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = EOS + 1
CONTEXT = 512
HI = [{"role": "user", "content": "hi"}]
OMITTED = object()
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(config(prefill=1, decode=1, step_s=0.0), tmp_path_factory.mktemp("bad")) as cluster:
        pids = cluster.pids()
        yield cluster
        assert cluster.pids() == pids


async def still_well(running: Stack) -> None:
    """A normal request, long enough to need both workers."""
    outcome = await ask_http(running, Ask(tuple(range(100)), 3))
    assert outcome.end is End.OK, outcome


async def refused(running: Stack, raw: bytes, status: int) -> HttpAnswer:
    """Send it: a whole answer with this status, in OpenAI's shape, within a second; and the cluster is well."""
    asked = CLOCK.now()
    answer = await running.call(raw)
    assert CLOCK.now() - asked < WITHIN_S
    assert answer.status == status, answer
    assert answer.whole
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    await still_well(running)
    return answer


# Field -> values that are not possible for it, at both endpoints.
SHARED: dict[str, list[object]] = {
    "model": [OMITTED, 5, None, ["tracer"]],
    "max_tokens": [0, -1, 2**31, 2**63, 10**30, 1.5, "5", True, [5], CONTEXT],
    "n": [0, -1, 17, 10**6, 2**63, 1.5, "1", True],
    "temperature": [-1, 2.1, 1e308, "hot", True, []],
    "top_p": [0, -0.5, 1.1, 1e308, "all"],
    "top_k": [-2, 2**31, 2**63, 0.5, "1"],
    "seed": [2**64, -(2**63) - 1, 1.5, "1", True],
    "prompt_logprobs": [-1, 21, 2**63, 1.5, "1", True],
    "include_stop_str_in_output": [1, "yes"],
    "skip_special_tokens": [0, "no"],
    "stop": [[""], "", "x" * 2000, ["x"] * 10_000, 5, [1], {"a": 1}, [["x"]]],
    "stop_token_ids": [[-1], [VOCAB], [2**63], [1.5], [True], ["1"], list(range(200)), [1] * 100_000, "1", {}],
    "stream": ["yes", 1, []],
    "stream_options": [{"include_usage": True}, {"include_usage": 5}, 5],
    "ignore_eos": ["no", 1],
    "logit_bias": [
        {str(VOCAB): 1},
        {"5": 101},
        {"5": 1e308},
        {"5": "1"},
        {"5": True},
        {"x": 1},
        {"-1": 1},
        [[5, 1]],
        5,
        {str(i): 1 for i in range(300_000)},
    ],
    "min_p": [-0.1, 1.1, 1e308, "1", True],
    "min_tokens": [-1, 2**31, 2**63, 0.5, "1", CONTEXT],
    "presence_penalty": [-2.1, 2.1, 1e308, "1", True],
    "frequency_penalty": [-2.1, 2.1, 1e308, [], {}],
    "repetition_penalty": [0, -1, 101, 1e308, "1"],
    "response_format": ["json", {"type": "yaml"}, {"type": "json_schema"}],
    "guided_choice": ["a", [], [1], ["a"] * 10_000],
}
PROMPTS: list[object] = [
    OMITTED, None, "", [], [[]], [""], 5, 1.5, True, {}, [1.5], [True], [None], [-1], [VOCAB], [2**63], [2**64],
    ["a", 1], ["a", [1]], ["a", ""], [[1], []], ["a"] * 1000, [[[1]]], [1, "a"], "x" * CONTEXT,
    [1] * CONTEXT, [1] * 100_000, "é" * 300, [0, -(2**63)],
]  # fmt: skip
COMPLETION_ONLY: dict[str, list[object]] = {
    "prompt": PROMPTS,
    "logprobs": [-1, 21, 10**6, 1.5, True, "5"],
    "best_of": [5, 0, -1, 10**6],
    "echo": [5, "yes"],
    "suffix": ["end"],
}
CHAT_ONLY: dict[str, list[object]] = {
    "messages": [
        OMITTED, None, [], {}, "hi", 5, [5], [[]], [{}], [{"role": "user"}], [{"content": "hi"}], HI * 1000,
        [{"role": "king", "content": "hi"}], [{"role": 5, "content": "hi"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": []}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
        [{"role": "user", "content": "x" * CONTEXT}], [{"role": "function", "content": "hi"}],
        [{"role": "tool", "content": None}], [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "user", "content": "hi", "tool_calls": CALLS}], [{"role": "assistant", "tool_calls": "f"}],
    ],
    "max_completion_tokens": [0, -1, 2**31, "5", 1.5, CONTEXT],
    "top_logprobs": [5, -1, 21, 10**6],
    "tools": [
        5, {}, [5], [{"type": "function"}], [{"type": "x", "function": {"name": "f"}}], [TOOL] * 129, [None],
        [{"type": "function", "function": {"name": "a b"}}], [{"type": "function", "function": {"name": "x" * 200}}],
        [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
    ],
    "tool_choice": ["required", "f", 5, [], {}, {"type": "function", "function": {"name": "f"}}],
    "continue_final_message": [5, "yes"],
    "chat_template_kwargs": [5, [], {"messages": []}],
    "response_format": [{"type": "json_schema"}],
}  # fmt: skip


def cases(*tables: dict[str, list[object]]) -> list[object]:
    return [
        pytest.param(field, value, id=f"{field}-{at}")
        for table in tables
        for field, values in table.items()
        for at, value in enumerate(values)
    ]


def body(endpoint: str, field: str, value: object) -> bytes:
    prompt: dict[str, Any] = {"prompt": "hi"} if endpoint == COMPLETIONS else {"messages": HI}
    fields: dict[str, object] = {"model": MODEL, **prompt, "max_tokens": 2}
    if field == "max_completion_tokens":
        del fields["max_tokens"]
    fields[field] = value
    return json.dumps({name: value for name, value in fields.items() if value is not OMITTED}).encode()


@pytest.mark.parametrize(("field", "value"), cases(SHARED, COMPLETION_ONLY))
async def test_completion_fields(running: Stack, field: str, value: object) -> None:
    if field == "stream_options" and value == {"include_usage": True}:
        value = {"include_usage": True, "stream": True}
    answer = await refused(running, post_bytes(COMPLETIONS, body(COMPLETIONS, field, value)), 400)
    assert answer.json["error"]["param"].startswith(field), answer


@pytest.mark.parametrize(("field", "value"), cases(SHARED, CHAT_ONLY))
async def test_chat_fields(running: Stack, field: str, value: object) -> None:
    answer = await refused(running, post_bytes(CHAT, body(CHAT, field, value)), 400)
    assert answer.json["error"]["param"].startswith(field), answer


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_unknown_model(running: Stack, endpoint: str) -> None:
    for name in ("gpt-9", "", "tracer\n", "TRACER", "x" * 100_000):
        answer = await refused(running, post_bytes(endpoint, body(endpoint, "model", name)), 404)
        assert (answer.json["error"]["param"], answer.json["error"]["code"]) == ("model", "model_not_found")
        assert len(answer.body) < 1000


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", sorted(INTERNAL))
async def test_internal_fields(running: Stack, field: str, endpoint: str) -> None:
    answer = await refused(running, post_bytes(endpoint, body(endpoint, field, "x")), 400)
    assert (answer.json["error"]["param"], answer.json["error"]["code"]) == (field, "internal_parameter")


HEAD = b'{"model":"tracer","max_tokens":2,'
NO_JSON = {
    "empty": b"",
    "a null": b"null",
    "a list": b"[]",
    "a number": b"5",
    "a string": b'"prompt"',
    "cut": HEAD + b'"prompt":"hi"',
    "NaN": HEAD + b'"prompt":"hi","temperature":NaN}',
    "Infinity": HEAD + b'"prompt":"hi","temperature":Infinity}',
    "bad UTF-8": HEAD + b'"prompt":"\xff\xfe"}',
    "bad UTF-8 in a name": HEAD + b'"prompt":"hi","\xff":1}',
    "surrogate": HEAD + b'"prompt":"\\ud800"}',
    "deep": HEAD + b'"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "binary": bytes(range(256)),
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "form": b"model=tracer&prompt=hi",
    "two": HEAD + b'"prompt":"hi"}{}',
}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", NO_JSON)
async def test_no_json(running: Stack, kind: str, endpoint: str) -> None:
    answer = await refused(running, post_bytes(endpoint, NO_JSON[kind]), 400)
    assert answer.json["error"]["code"] == "invalid_json"


async def test_deep_nesting_that_json_allows(running: Stack) -> None:
    for depth in (100, 1000):
        nested = b"[" * depth + b"]" * depth
        answer = await refused(running, post_bytes(COMPLETIONS, HEAD + b'"prompt":' + nested + b"}"), 400)
        assert answer.json["error"]["param"] in ("prompt", None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_wrong_content_type(running: Stack, kind: str) -> None:
    good = json.dumps(Ask((1, 2), 1).body()).encode()
    answer = await refused(running, post_bytes(COMPLETIONS, good, **{"content-type": kind}), 415)
    assert answer.json["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_ten_megabytes(running: Stack, endpoint: str, chunked: bool) -> None:
    huge = body(endpoint, "user", "x" * TEN_MB)
    raw = post_bytes(endpoint, huge)
    if chunked:
        head = request_head("POST", endpoint, {"content-type": "application/json", "transfer-encoding": "chunked"})
        raw = head + b"%x\r\n" % len(huge) + huge + b"\r\n0\r\n\r\n"
    answer = await refused(running, raw, 413)
    assert answer.json["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/live", 405),
        ("GET", "/status", 404),
        ("GET", "/metrics", 404),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("POST", "//v1/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/V1/completions", 404),
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%00%ff", 404),
    ],
)
async def test_wrong_paths(running: Stack, method: str, path: str, status: int) -> None:
    await refused(running, request_head(method, path, {"content-length": "0"}), status)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        request_head("POST", COMPLETIONS, {"content-length": "-5"}),
        request_head("POST", COMPLETIONS, {"content-length": "many"}),
        request_head("POST", COMPLETIONS, {"transfer-encoding": "chunked"}) + b"zz\r\n",
        request_head("GET", "/live", {"x": "y" * 1_000_000}),
    ],
    ids=["tls", "no path", "negative length", "no length", "bad chunk", "huge header"],
)
async def test_no_http(running: Stack, raw: bytes) -> None:
    """Whatever the HTTP server makes of it: no success, and nobody is hurt."""
    async with connect(running.url) as connection:
        await connection.send(raw)
        connection.say_no_more()
        answer = await connection.answer()
    assert answer.status == 0 or 400 <= answer.status < 500
    await still_well(running)


async def test_request_ids_are_only_echoed(running: Stack) -> None:
    """One id for many requests at once, and ids that are none (FAULTS C37)."""
    good = json.dumps(Ask((1, 2), 2).body()).encode()
    for name in ("same", "same", "", "a" * 10_000, "b c", "ü"):
        answer = await running.call(post_bytes(COMPLETIONS, good, **{"x-request-id": name}))
        assert answer.status == 200
        assert (answer.headers["x-request-id"] == name) == (name == "same")


GRPC_BAD: dict[str, list[pb.GenerateRequest]] = {
    "prompt": [
        pb.GenerateRequest(),
        pb.GenerateRequest(prompt=""),
        pb.GenerateRequest(prompt="x" * CONTEXT),
        pb.GenerateRequest(prompt="x" * TEN_MB),
    ],
    "token_ids": [
        pb.GenerateRequest(token_ids=pb.TokenIds()),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31 - 1])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * CONTEXT)),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1_000_000)),
    ],
    "chat": [
        pb.GenerateRequest(chat=pb.Chat()),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="king", content="hi")])),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()])),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")] * 5000)),
    ],
    "max_tokens": [pb.GenerateRequest(prompt="hi", max_tokens=v) for v in (0, -1, CONTEXT, 2**31 - 1, -(2**31))],
    "n": [pb.GenerateRequest(prompt="hi", n=v) for v in (0, -1, 17, 10**6)],
    "temperature": [pb.GenerateRequest(prompt="hi", temperature=v) for v in (-1, 1e308, float("nan"), float("inf"))],
    "top_p": [pb.GenerateRequest(prompt="hi", top_p=v) for v in (0, -1, 2, float("nan"))],
    "top_k": [pb.GenerateRequest(prompt="hi", top_k=v) for v in (-2, -(2**31))],
    "logprobs": [pb.GenerateRequest(prompt="hi", logprobs=v) for v in (-1, 21, 2**31 - 1)],
    "stop": [
        pb.GenerateRequest(prompt="hi", stop=[""]),
        pb.GenerateRequest(prompt="hi", stop=["x" * 2000]),
        pb.GenerateRequest(prompt="hi", stop=["x"] * 10_000),
    ],
    "stop_token_ids": [pb.GenerateRequest(prompt="hi", stop_token_ids=v) for v in ([-1], [VOCAB], [1] * 10_000)],
}


@pytest.mark.parametrize("field", GRPC_BAD)
async def test_grpc_fields(running: Stack, field: str) -> None:
    async with channel(running.cluster.grpc_address) as connection:
        for message in GRPC_BAD[field]:
            asked = CLOCK.now()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(InferenceStub(connection).Generate(message, timeout=10.0)))
            assert CLOCK.now() - asked < WITHIN_S
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
            assert field in (caught.value.details() or "") or message.ByteSize() > TEN_MB
            await still_well(running)


async def test_grpc_unknown_model_and_methods(running: Stack) -> None:
    async with channel(running.cluster.grpc_address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(InferenceStub(connection).Generate(pb.GenerateRequest(model="gpt-9", prompt="hi"))))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        for method, payload, code in (
            ("/headrace.v1.Inference/Generate", b"\xff" * 50, grpc.StatusCode.UNKNOWN),
            ("/headrace.v1.Inference/Generate", b"\x12\x02\xff\xfe", grpc.StatusCode.UNKNOWN),  # prompt: bad UTF-8
            ("/headrace.v1.Inference/Other", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("/headrace.v1.Session/Open", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("/headrace.v1.Link/Open", b"", grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(connection.unary_stream(method, None, None)(payload)))
            assert caught.value.code() is code, (method, caught.value)
            await still_well(running)
