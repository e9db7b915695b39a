"""What the benchmark clients of docs/clients.md send is taken, field by field; what they read of an answer is there."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from router.front.http_app import make_app
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, make_front

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]
HI = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EACH_CHUNK = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
EXACTLY = {"stop": None, "ignore_eos": True}
SENT: dict[str, tuple[str, Json]] = {
    "guidellm chat": (CHAT, {"messages": PARTS, "max_completion_tokens": 4, **EACH_CHUNK, **EXACTLY}),
    "guidellm completions": (COMPLETIONS, {"prompt": "hi", "max_tokens": 4, **EACH_CHUNK, **EXACTLY}),
    "aiperf chat": (CHAT, {"messages": HI, "max_completion_tokens": 4, **STREAM}),
    "aiperf completions": (COMPLETIONS, {"prompt": "hi", "max_tokens": 4, "ignore_eos": True, **STREAM}),
    "vllm chat": (CHAT, {"messages": HI, "max_completion_tokens": 4, **STREAM}),
    "vllm completions": (
        COMPLETIONS,
        {"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, **STREAM},
    ),
    "vllm --ignore-eos --temperature 0": (
        COMPLETIONS,
        {
            "prompt": [104, 105], "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, **STREAM,
            "ignore_eos": True, "temperature": 0.0,
        },
    ),
}  # fmt: skip


def client(dispatcher: FakeDispatcher) -> TestClient:
    return TestClient(make_app(make_front(dispatcher), dispatcher))


def events(text: str) -> list[Json]:
    *whole, done = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(event) for event in whole]


@pytest.mark.parametrize("name", SENT)
def test_what_benchmark_clients_send_is_taken(name: str) -> None:
    path, fields = SENT[name]
    answer = client(FakeDispatcher(say("abcd", end=False))).post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer.text)
    words = [
        choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert "".join(words) == "abcd"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_what_clients_ask_before_they_start() -> None:
    """guidellm asks /health and the models; vLLM's client the models when no name is given, and what a prompt costs."""
    dispatcher = FakeDispatcher(say("a"))
    asking = client(dispatcher)
    assert asking.get("/health").status_code == 200
    assert asking.get("/v1/models").json()["data"][0]["id"] == MODEL
    told = asking.post("/tokenize", json={"model": MODEL, "prompt": "hi", "add_special_tokens": False}).json()
    assert asking.post("/detokenize", json={"model": MODEL, "tokens": told["tokens"]}).json() == {"prompt": "hi"}
    dispatcher.available = False
    answer = asking.get("/health")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
