"""Tokens that go to the socket in the pass that brings them: the same answer, and the same patience with who lags."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings
from router.front.door import FrontDoor
from router.front.http_app import make_app
from router.front.http_protocol import BoundedHttp
from router.front.metrics import FrontMetrics
from router.front.model_text import load_model_text
from router.requests import Request, TokenEvent, TokenLogprob
from router.runtime import RunningRequest
from tests.fakes.dispatcher import FakeDispatcher, say

COMPLETION = {"model": "m", "prompt": "x", "max_tokens": 9, "stream": True}
A, B, C, D = (TokenEvent(0, (token,)) for token in b"ABCD")
END = TokenEvent(0, (1023,), (), "eos")


class Wire(asyncio.Transport):
    """A connection whose other side reads all that is written, unless the protocol is told otherwise."""

    def __init__(self, protocol: type[HttpToolsProtocol], front: FrontDoor, dispatcher: FakeDispatcher) -> None:
        super().__init__()
        self.written = b""
        app = make_app(front, dispatcher)
        config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3", http=protocol)
        config.load()
        self.protocol = protocol(config, ServerState(), {})
        self.protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    @property
    def payloads(self) -> list[Any]:
        """What every event says, but for the id of the answer."""
        events = [event for event in b"".join(_chunks(self.written)).split(b"\n\n") if event.startswith(b"data: {")]
        return [orjson.loads(event.removeprefix(b"data: ")) | {"id": ""} for event in events]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for payload in self.payloads for choice in payload["choices"])


def _chunks(written: bytes) -> Iterator[bytes]:
    """Of a chunked body."""
    rest = written.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        yield rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


class Live(FakeDispatcher):
    """The router's own running requests, which the test pushes events to. A front door's stop is the request's end."""

    def __init__(self) -> None:
        super().__init__(say(""))
        self.running: dict[str, RunningRequest] = {}

    def run(self, request: Request) -> RunningRequest:  # type: ignore[override]
        return RunningRequest(self, request)  # type: ignore[arg-type]

    def admit(self, running: RunningRequest, request: Request) -> None:
        self.running[request.request_id] = running

    def leave(self, request_id: str) -> None:
        del self.running[request_id]

    def stop(self, request_id: str, index: int) -> None:
        self.running[request_id].finish(None)


class Rig:
    def __init__(self, protocol: type[HttpToolsProtocol] = BoundedHttp) -> None:
        self.dispatcher = Live()
        self.metrics = FrontMetrics(CollectorRegistry(), ManualClock())
        text = load_model_text(None)
        front = FrontDoor(RouterSettings(), "m", text, self.dispatcher, self.metrics.clock, self.metrics)
        self.wire = Wire(protocol, front, self.dispatcher)

    async def ask(self, body: dict[str, Any], path: str = "/v1/completions") -> RunningRequest:
        raw = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.wire.protocol.data_received(head.encode() + raw)
        await settle()
        [running] = self.dispatcher.running.values()
        return running

    @property
    def delivered(self) -> float:
        return float(self.metrics.output_tokens._value.get())


async def settle() -> None:
    """Everybody who can go on does."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_follows_the_first_token_is_written_at_once() -> None:
    rig = Rig()
    running = await rig.ask(COMPLETION)
    running.push(A)
    assert rig.wire.written == b"", "the head is the server's"
    await settle()
    running.push(B)
    running.push(C)
    assert rig.wire.text == "ABC"
    running.push(END)
    running.finish(None)
    await settle()
    assert rig.wire.payloads[-1]["choices"][0]["finish_reason"] == "stop"
    assert rig.wire.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert rig.delivered == 4
    assert not rig.dispatcher.running


async def test_who_lags_gets_what_came_meanwhile_as_one_event() -> None:
    rig = Rig()
    running = await rig.ask(COMPLETION)
    running.push(A)
    await settle()
    rig.wire.protocol.pause_writing()
    running.push(B)
    await settle()  # this one is being written
    running.push(C)
    running.push(D)
    assert rig.wire.text == "A"
    rig.wire.protocol.resume_writing()
    running.push(TokenEvent(0, (ord("E"),)))
    assert rig.wire.text == "A", "it overtakes nothing"
    await settle()
    assert [payload["choices"][0]["text"] for payload in rig.wire.payloads] == ["A", "B", "CDE"]
    running.push(TokenEvent(0, (ord("F"),)))
    assert rig.wire.text == "ABCDEF"


async def test_who_has_left_is_written_nothing() -> None:
    rig = Rig()
    running = await rig.ask(COMPLETION)
    running.push(A)
    await settle()
    rig.wire.protocol.connection_lost(None)
    running.push(B)
    assert rig.wire.text == "A"
    await settle()
    assert not rig.dispatcher.running


async def test_a_whole_answer_is_gathered_without_waking_anybody() -> None:
    rig = Rig()
    running = await rig.ask(COMPLETION | {"stream": False})
    for event in (A, B, C, END):
        running.push(event)
    running.finish(None)
    await settle()
    body = orjson.loads(rig.wire.written.partition(b"\r\n\r\n")[2])
    assert body["choices"][0]["text"] == "ABC"
    assert body["usage"]["completion_tokens"] == rig.delivered == 4


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
TWO = [TokenEvent(index, (token,)) for token in b"AB" for index in (0, 1)]
LOGPROBS = [TokenEvent(0, (token,), (TokenLogprob(-0.5, ((token, -0.5),)),)) for token in b"ABC"]
ODD = [TokenEvent(0, (byte,)) for byte in '"\\é\n€'.encode()]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (COMPLETION, [A, B, C, END]),
        (COMPLETION | USAGE, [A, B, END]),
        (COMPLETION | {"n": 2}, [*TWO, END, TokenEvent(1, (), (), "length")]),
        (COMPLETION | {"logprobs": 1}, [*LOGPROBS, END]),
        (COMPLETION | {"stop": "CD"}, [A, B, C, D, A]),
        (COMPLETION | {"echo": True}, [A, B, END]),
        (COMPLETION, [*ODD, END]),
        (COMPLETION, [A, TokenEvent(0, (0xE2,)), TokenEvent(0, (0x82,)), END]),
        (CHAT, [A, B, C, END]),
        (CHAT | USAGE, [A, B, END]),
        (CHAT | {"n": 2}, [*TWO, END, TokenEvent(1, (), (), "length")]),
        (CHAT | {"logprobs": True, "top_logprobs": 1}, [*LOGPROBS, END]),
    ],
)
async def test_a_stream_says_the_same_either_way(body: dict[str, Any], events: Sequence[TokenEvent]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    said = []
    for protocol in (HttpToolsProtocol, BoundedHttp):
        rig = Rig(protocol)
        running = await rig.ask(body, path)
        for event in events:
            running.push(event)
            await settle()
        running.finish(None)
        await settle()
        assert rig.wire.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        said.append((rig.wire.payloads, rig.delivered))
    assert said[0][0]
    assert _without_times(said[0]) == _without_times(said[1])


def _without_times(said: tuple[list[Any], float]) -> Any:
    return [payload | {"created": 0} for payload in said[0]], said[1]
