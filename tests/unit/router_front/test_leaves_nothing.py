"""What a request leaves behind when it is over: nothing that only the garbage collector would find.

A router's collector runs seldom (router/server.py), so a cycle with a prompt in it would be memory lost for a while.
"""

import asyncio
import gc
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings
from cluster.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from router.front.auth import Authenticate
from router.front.bodies import CompletionBody
from router.front.door import FrontDoor
from router.front.http_inference import InferenceEndpoint
from router.front.metrics import FrontMetrics
from router.front.model_text import load_model_text
from router.requests import Request, TokenEvent
from router.runtime import RunningRequest
from tests.fakes.dispatcher import FakeDispatcher, say


class NoRuntime:
    """What a running request is admitted by, and leaves."""

    def admit(self, running: RunningRequest, request: Request) -> None: ...

    def leave(self, request_id: str) -> None: ...

    def stop(self, request_id: str, index: int) -> None: ...


class AtOnce(FakeDispatcher):
    """The router's own running requests, whose answer, or its end, is there from the beginning."""

    def __init__(self, error: HeadraceError | None) -> None:
        super().__init__(say("x"))
        self._error = error

    def run(self, request: Request) -> RunningRequest:  # type: ignore[override]
        running = RunningRequest(NoRuntime(), request)  # type: ignore[arg-type]
        if self._error is None:
            running.push(TokenEvent(0, (65, 66), (), "length"))
        running.finish(None if self._error is None else type(self._error)(str(self._error)))
        return running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [None, Unavailable("nobody"), DeadlineExceeded("late")], ids=["ok", "503", "504"])
def test_of_no_request_anything_is_left(error: HeadraceError | None, stream: bool) -> None:
    metrics = FrontMetrics(CollectorRegistry(), ManualClock())
    front = FrontDoor(RouterSettings(), "m", load_model_text(None), AtOnce(error), metrics.clock, metrics)
    app = Authenticate(InferenceEndpoint(front, "completions", CompletionBody), front.gate)
    body = orjson.dumps({"model": "m", "prompt": "x", "max_tokens": 2, "stream": stream})
    statuses: list[int] = []

    async def ask() -> None:
        bodies, left = [body], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        headers = [(b"content-type", b"application/json")]
        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)

    async def several() -> int:
        for _ in range(3):
            await ask()  # what is made once, and stays
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                await ask()
            return gc.collect()
        finally:
            gc.enable()

    assert asyncio.run(several()) < 10, "fewer than one object a request"
    assert set(statuses) == {200 if error is None else 503 if isinstance(error, Unavailable) else 504}
