"""Event streams that have nothing to say for long, on a loop whose time jumps."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings
from cluster.core.errors import BrokenOff, RequestFailed, Unavailable
from router.front.auth import Authenticate
from router.front.bodies import CompletionBody
from router.front.door import FrontDoor
from router.front.http_inference import InferenceEndpoint
from router.front.metrics import FrontMetrics
from router.front.model_text import load_model_text
from router.requests import TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, Step
from tests.unit.machines.virtual import VirtualLoop

EVERY_S = RouterSettings().sse_keep_alive_s
COMMENT = b": keep-alive\n\n"
A, END = TokenEvent(0, (65,)), TokenEvent(0, (1023,), (), "eos")


class Asked:
    """One call of a client that reads what it is sent, unless `reading` is cleared."""

    def __init__(self, loop: VirtualLoop, *, stream: bool = True, every_s: float = EVERY_S) -> None:
        self.loop = loop
        self.steps: list[Step] = []
        self.at = 0.0
        self.sent: list[tuple[float, dict[str, Any]]] = []
        self.reading, self.left = asyncio.Event(), asyncio.Event()
        self.reading.set()
        self.dispatcher = FakeDispatcher(lambda _: self.steps)
        settings = RouterSettings(sse_keep_alive_s=every_s)
        self.metrics = FrontMetrics(CollectorRegistry(), ManualClock())
        text = load_model_text(None)
        front = FrontDoor(settings, "m", text, self.dispatcher, self.metrics.clock, self.metrics)
        self.app = Authenticate(InferenceEndpoint(front, "completions", CompletionBody), front.gate)
        self.bodies = [orjson.dumps({"model": "m", "prompt": "x", "max_tokens": 100, "stream": stream})]

    def wait(self, seconds: float) -> None:
        """Its answer has nothing to say for so long."""
        self.steps.append(event := asyncio.Event())
        self.at += seconds
        self.loop.call_later(self.at, event.set)

    def run(self) -> "Asked":
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        self.loop.run(self.app(scope, self._receive, self._send))
        return self

    async def _receive(self) -> dict[str, Any]:
        if self.bodies:
            return {"type": "http.request", "body": self.bodies.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        assert (message["type"] == "http.response.start") == (not self.sent), "the head goes first, and once"
        self.sent.append((self.loop.time(), message))

    @property
    def status(self) -> int:
        status = self.sent[0][1]["status"]
        assert isinstance(status, int)
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0][1]["headers"])

    @property
    def written(self) -> list[tuple[float, bytes]]:
        return [(round(at, 3), message["body"]) for at, message in self.sent[1:]]

    @property
    def comments(self) -> list[float]:
        """When they came."""
        return [at for at, body in self.written if body == COMMENT]

    @property
    def outcomes(self) -> set[str]:
        return {outcome for (_, outcome), count in self.metrics.by_outcome.items() if count._value.get()}


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.stop_all()


def whole(body: Sequence[tuple[float, bytes]]) -> bytes:
    return b"".join(each for _, each in body)


def test_a_stream_that_is_silent_in_its_midst_gets_a_comment_each_time(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    asked.steps.append(A)
    asked.wait(3.5 * EVERY_S)
    asked.steps.append(END)
    asked.run()
    assert asked.comments == [EVERY_S, 2 * EVERY_S, 3 * EVERY_S]
    assert whole(asked.written).endswith(b"data: [DONE]\n\n")
    assert asked.outcomes == {"ok"}


def test_before_its_first_token_nothing_goes_out(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    asked.wait(1.5 * EVERY_S)
    asked.steps += [A, END]
    asked.run()
    assert (asked.status, asked.headers[b"content-type"][:17]) == (200, b"text/event-stream")
    assert asked.comments == []
    assert asked.sent[0][0] == 1.5 * EVERY_S


def test_the_silence_counts_from_the_last_token(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    for _ in range(10):
        asked.steps.append(A)
        asked.wait(0.9 * EVERY_S)
    asked.wait(0.2 * EVERY_S)
    asked.steps.append(END)
    asked.run()
    assert asked.comments == [9 * 0.9 * EVERY_S + EVERY_S]


def test_one_timer_is_all_there_is_however_many_tokens_come(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[..., object]] = []
    call_later = loop.call_later

    def counting(delay: float, callback: Callable[..., object], *args: object, **more: Any) -> asyncio.TimerHandle:
        timers.append(callback)
        return call_later(delay, callback, *args, **more)

    asked = Asked(loop)
    asked.steps += [*[A] * 90, END]
    monkeypatch.setattr(loop, "call_later", counting)
    asked.run()
    assert len(timers) == 1
    assert not [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stream", "every_s"), [(True, 0.0), (False, EVERY_S)])
def test_switched_off_or_not_a_stream_nothing_is_said(loop: VirtualLoop, stream: bool, every_s: float) -> None:
    asked = Asked(loop, stream=stream, every_s=every_s)
    asked.wait(100.0)
    asked.steps += [A, END]
    asked.run()
    assert asked.comments == []
    assert asked.sent[0][0] >= 100.0


def test_a_failure_after_a_comment_is_an_event_without_done(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    asked.steps.append(A)
    asked.wait(1.5 * EVERY_S)
    asked.steps.append(Unavailable("nobody is ready"))
    asked.run()
    assert asked.comments == [EVERY_S]
    assert b'"code":"unavailable"' in whole(asked.written)
    assert b"[DONE]" not in whole(asked.written)
    assert asked.outcomes == {"unavailable"}


def test_a_failure_however_long_before_the_first_token_is_a_status(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    asked.wait(3.5 * EVERY_S)
    asked.steps.append(Unavailable("nobody is ready"))
    asked.run()
    assert asked.status == 503


def test_a_client_that_does_not_read_is_told_once_and_its_next_token_comes_after_that(loop: VirtualLoop) -> None:
    asked = Asked(loop)
    asked.steps.append(A)
    asked.wait(3.5 * EVERY_S)
    asked.steps += [A, END]
    loop.call_later(0.5 * EVERY_S, asked.reading.clear)
    loop.call_later(4 * EVERY_S, asked.reading.set)
    asked.run()
    assert asked.comments == [4 * EVERY_S]
    assert [at for at, body in asked.written if b'"text":"A"' in body] == [0.0, 4 * EVERY_S]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("when", [0.5, 1.0, 1.5])
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(loop: VirtualLoop, when: float, reads: bool) -> None:
    asked = Asked(loop)
    asked.steps.append(A)
    asked.wait(1000.0)
    if not reads:
        loop.call_later(0.1, asked.reading.clear)
    loop.call_later(when * EVERY_S, asked.left.set)
    asked.run()
    assert asked.outcomes == {"cancelled"}
    assert not asked.dispatcher.active
    sent = len(asked.sent)
    loop.let_pass(10 * EVERY_S)
    assert len(asked.sent) == sent
    assert not asyncio.all_tasks(loop)


@pytest.mark.parametrize("stream", [True, False])
def test_what_breaks_off_before_its_client_has_anything_can_be_asked_for_again(loop: VirtualLoop, stream: bool) -> None:
    """The router had tokens; of a whole answer no client has any before its end."""
    asked = Asked(loop, stream=stream)
    asked.steps += [*([] if stream else [A, A]), BrokenOff("no decode worker is ready")]
    asked.run()
    assert (asked.status, asked.headers[b"retry-after"]) == (503, b"1")
    assert b'"code":"unavailable"' in whole(asked.written)
    assert asked.outcomes == {"unavailable"}


@pytest.mark.parametrize(("stream", "error"), [(True, BrokenOff("gone")), (False, RequestFailed("it cannot be run"))])
def test_what_cannot_be_asked_for_again_has_failed(loop: VirtualLoop, stream: bool, error: RequestFailed) -> None:
    asked = Asked(loop, stream=stream)
    asked.steps += [A, error]
    asked.run()
    assert asked.status == (200 if stream else 500)
    assert b"retry-after" not in asked.headers
    assert b'"code":"request_failed"' in whole(asked.written)
    assert asked.outcomes == {"failed"}
