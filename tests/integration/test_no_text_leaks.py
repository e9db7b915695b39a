"""A word that only clients know goes through every success and failure there is; then everything written is searched.

Prompts, answers, grammars, stop strings, tools, broken bodies; workers that die in mid-stream, clients that leave,
deadlines that pass (FAULTS O08, I6, I10). What is searched: all logs at level debug, every file of the run directory,
metrics, status, what is told of recent requests, and the headers of every answer.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from tests.integration.stack import MODEL, HttpAnswer, Json, Stack, config, connect, post_bytes, request_head, stack

WORD = "Zwetschgenknoedel"
LONG = f"{WORD} " * 4
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("leaks")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Stack]:
    settings = config(prefill=1, decode=1, step_s=0.01, timing={"resume_s": 0.5}, handoff={"offer_timeout_s": 0.5})
    with stack(settings.model_copy(update={"log_level": "debug"}), folder) as cluster:
        yield cluster


@dataclass
class Told:
    """What came back, by name. `shown` is what must not have the word: all but the bodies of answers."""

    statuses: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def add(self, name: str, answer: HttpAnswer) -> None:
        self.statuses[name] = answer.status
        self.shown.append(repr(answer.headers))


def chat(**more: object) -> Json:
    return {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "max_tokens": 4, **more}


def text(**more: object) -> Json:
    return {"model": MODEL, "prompt": LONG, "max_tokens": 4, **more}


TOOL = {"type": "function", "function": {"name": WORD, "description": WORD, "parameters": {"type": "object"}}}
SERVED: dict[str, tuple[str, Json]] = {
    "whole": (TEXT, text(logprobs=2)),
    "streamed": (TEXT, text(stream=True, stop=[WORD])),
    "chat": (CHAT, chat(stream=True)),
    "tools": (CHAT, chat(tools=[TOOL], messages=[{"role": "user", "content": WORD}])),
    "echo": (TEXT, text(echo=True, n=2)),
    "grammar": (TEXT, text(guided_choice=[WORD], max_tokens=32)),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": LONG}),
}
REFUSED: dict[str, tuple[str, Json]] = {
    "model": (TEXT, text() | {"model": WORD}),
    "max_tokens": (TEXT, text(max_tokens=WORD)),
    "field": (TEXT, text(prompt_logprobs={WORD: 1}, best_of=WORD)),
    "role": (CHAT, chat() | {"messages": [{"role": WORD, "content": LONG}]}),
    "content": (CHAT, chat() | {"messages": [{"role": "user", "content": {WORD: WORD}}]}),
    "too long": (TEXT, text() | {"prompt": WORD * 2000}),
    "schema": (TEXT, text(guided_json={"type": WORD, "enum": WORD})),
    "regex": (TEXT, text(guided_regex=f"({WORD}")),
    "lark": (TEXT, text(guided_grammar=f"start: {WORD} ]")),
    "tool": (CHAT, chat(tools=[{"type": WORD}])),
    "response_format": (CHAT, chat(response_format={"type": WORD})),
}
BROKEN: dict[str, bytes] = {
    "no JSON": f'{{"prompt": "{WORD}'.encode(),
    "no UTF-8": b'{"model": "tracer", "prompt": "' + WORD.encode() + b'\xff"}',
    "nested": b'{"prompt": ' + b"[" * 5000 + WORD.encode(),
    "large": b'{"prompt": "' + WORD.encode() * 300_000 + b'"}',
}


async def sent(running: Stack, told: Told) -> None:
    for name, (path, body) in (SERVED | REFUSED).items():
        told.add(name, await running.post(path, body))
        expected = 200 if name in SERVED else 400
        assert told.statuses[name] == expected or (name, told.statuses[name]) == ("model", 404), (name, told.statuses)
    for name, raw in BROKEN.items():
        told.add(name, await running.call(post_bytes(TEXT, raw)))
        assert told.statuses[name] in (400, 413), name
    for path in (f"/v1/{WORD}", f"/{WORD}", f"/debug/requests/{WORD}"):
        told.add(path, await running.get(path))
    await running.call(request_head("GET", f"/{WORD}\xff", {WORD: WORD}))
    await running.call(f"{WORD} / {WORD}\r\n\r\n".encode())


async def sent_over_grpc(running: Stack) -> None:
    async with channel(running.cluster.grpc_address) as wire:
        stub = InferenceStub(wire)
        good = [
            pb.GenerateRequest(prompt=LONG, max_tokens=3),
            pb.GenerateRequest(prompt=LONG, max_tokens=3, stop=[WORD]),
        ]
        for request in good:
            assert [event async for event in stub.Generate(request)]
        bad = [
            pb.GenerateRequest(prompt=LONG, max_tokens=-1),
            pb.GenerateRequest(prompt=LONG, regex=f"({WORD}"),
            pb.GenerateRequest(prompt=LONG, json_schema=WORD),
            pb.GenerateRequest(prompt=LONG, model=WORD),
        ]
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [event async for event in stub.Generate(request)]
        with pytest.raises(grpc.aio.AioRpcError):
            await wire.unary_unary(f"/{WORD}/{WORD}", None, None)(WORD.encode(), timeout=WITHIN_S)
        slow = pb.GenerateRequest(prompt=LONG, max_tokens=300, ignore_eos=True)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            _ = [event async for event in stub.Generate(slow, timeout=0.3)]
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def begun(running: Stack, killed: psutil.Process | None) -> bytes:
    """A stream whose worker dies, or whose client leaves, when its answer has begun. What came of the answer."""
    async with asyncio.timeout(WITHIN_S), connect(running.url) as line:
        body = json.dumps(text(stream=True, max_tokens=200, ignore_eos=True)).encode()
        await line.send(post_bytes(TEXT, body))
        await line.receive(400)
        if killed is not None:
            killed.kill()
            await line.receive(None)
        return bytes(line.received)


async def test_no_text_of_a_client_is_written_anywhere(running: Stack, folder: Path) -> None:
    told = Told()
    await sent(running, told)
    await sent_over_grpc(running)
    assert await begun(running, None)
    for name, at in (("decode-0", 1), ("decode-0", 0), ("prefill-0", 1), ("prefill-0", 0)):  # engines, then servers
        killed = psutil.Process(running.cluster.ready(name).pids[at])
        assert await begun(running, killed), name
        psutil.wait_procs([killed], WITHIN_S)
        await running.all_ready()
    shown = [*told.shown]
    for path in ("/metrics", "/status", "/openapi.json", "/ready"):
        shown.append((await running.get(path)).body.decode())
    written = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    logs = b"".join(content for file, content in written.items() if file.suffix == ".log")
    assert logs.count(b"\n") > 20, "there is something to search"
    for file, content in written.items():
        assert WORD.encode() not in content, (file, line_of(content))
    assert WORD not in "\n".join(shown)


def line_of(content: bytes) -> bytes:
    return next((line for line in content.splitlines() if WORD.encode() in line), b"")[:500]
