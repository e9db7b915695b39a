"""Ten thousand bodies at random: only 2xx and 4xx, nobody dies of one, and nothing is left of them."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from router.front.http_app import make_app
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.bodies_at_random import BODIES, PATHS
from tests.integration.front_door_server import make_front, passing_text
from tests.integration.stack import config, stack

FEW = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=10_000, derandomize=False)
JSON = {"content-type": "application/json"}


def test_a_few_bodies_at_random() -> None:
    dispatcher = FakeDispatcher(say("é🌶 ok"))
    client = TestClient(make_app(make_front(dispatcher, text=passing_text()), dispatcher))
    answers: Counter[int] = Counter()

    @FEW
    @given(path=PATHS, body=BODIES)
    def every_one(path: str, body: bytes) -> None:
        answer = client.post(path, content=body, headers=JSON)
        answers[answer.status_code] += 1
        assert answer.status_code // 100 in (2, 4), (path, body, answer.text)

    every_one()
    assert answers[200] > 30, answers
    assert answers[400] > 30, answers
    assert not dispatcher.active


@pytest.mark.verify
def test_ten_thousand_bodies_at_random(tmp_path: Path) -> None:
    answers: Counter[int] = Counter()
    with (
        stack(config(prefill=1, decode=1, step_s=0.0), tmp_path) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        pids = running.pids()

        @MANY
        @given(path=PATHS, body=BODIES)
        def every_one(path: str, body: bytes) -> None:
            answer = client.post(path, content=body, headers=JSON, timeout=30.0)
            answers[answer.status_code] += 1
            assert answer.status_code // 100 in (2, 4), (path, body, answer.text)

        every_one()
        client.close()
        assert running.pids() == pids
        asyncio.run(running.quiet())
    assert answers[200] > 1000, answers
    assert answers[400] > 1000, answers
