"""The dashboard over HTTP, without a browser: what its answers allow, what they tell, and who may act."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from cluster.core.clock import SystemClock
from cluster.pipe import Drain, Scale
from router.flows import Failover
from router.front.auth import Gate
from router.front.dashboard import actions
from router.front.dashboard.paths import ALL, DATA, DRAIN, FILES, SCALE
from router.front.http_app import make_app
from router.overview import FlowNow, Overview, WorkerNow
from router.records import AttemptRecord, record_of
from router.requests import Request, Trace
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, Served, make_front, serve
from tests.integration.test_api_keys import ACME, ROOT, bearer, gate

ACT = {"x-headrace-action": "1"}


@asynccontextmanager
async def served(keys: Gate | None = None) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async with (
        serve(FakeDispatcher(say("abc")), gate=keys) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        yield running, client


async def test_every_file_of_the_page_is_there_and_allows_nothing_foreign() -> None:
    async with served() as (_, client):
        for path in FILES:
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            for rule in ("default-src 'none'", "frame-ancestors 'none'", "form-action 'none'", "script-src 'self';"):
                assert rule in policy
            assert "unsafe" not in policy
            for elsewhere in ("http:", "//cdn", "innerHTML", "eval(", 'style="', "onclick="):
                assert elsewhere not in answer.text.replace("http://www.w3.org", ""), (path, elsewhere)


async def test_without_a_dashboard_there_are_no_routes() -> None:
    dispatcher = FakeDispatcher(say("x"))
    app = make_app(make_front(dispatcher), dispatcher)
    assert not ALL & {getattr(route, "path", "") for route in app.router.routes}


async def test_what_it_tells_has_numbers_and_names_and_no_word_of_anybody() -> None:
    clock = SystemClock()
    now = clock.now()
    request = Request("r1", "chat-1", tuple(b"the secret prompt"), 9, tenant="acme")
    trace = Trace("prefill-0", "decode-1", 2, 4, 2048, "shm", arrived=now - 0.5, left=now)
    record = record_of(request, trace, now - 0.49)
    record.attempts = [
        AttemptRecord("decode-0", (), False, (), 1.0, 2.0, 40.0, 90.0, "lost: worker is silent"),
        AttemptRecord("decode-1", (), False, (), 91.0, 92.0, 150.0, 480.0, "ok", "prefill-0", 2048, 7.0),
    ]
    record.ended("ok", now - 0.01)
    worker = WorkerNow("decode-1", "h:1", "decode", 7, "ready", 3, now - 9, 1.5, 64, 60, 2, 0, 1, 0, 1, 0)
    async with served() as (running, client):
        running.dispatcher.seen = Overview(
            now, [worker], [], [FlowNow(("prefill-0", "decode-1"), 1, 17, 4, 8192, 20.0)], [Failover(now, record, 0)],
            [record], 3, 120, 5,
        )  # fmt: skip
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})).status_code == 200
        answer = await client.get(DATA)
    told = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert told["pools"]["prefill"] == {"workers": [], "gone": []}
    (decode,) = told["pools"]["decode"]["workers"]
    assert (decode["restarts"], decode["blocks_used"], decode["blocks"], decode["away_s"]) == (2, 4, 64, 1.5)
    assert (told["queue"]["waiting"], told["queue"]["tokens"]) == (3, 120)
    assert told["flows"][0]["exposed_ms"] == 5.0
    assert (told["failovers"][0]["from"], told["failovers"][0]["to"]) == ("decode-0", "decode-1")
    (shown,) = told["requests"]
    assert shown["total_ms"] == pytest.approx(500, abs=0.01)
    assert sum(part["ms"] for part in shown["parts"]) == pytest.approx(shown["total_ms"], abs=0.05)
    assert [part["name"] for part in shown["parts"] if part["lost"]] == ["admit", "prefill", "decode"]
    recent = told["recent"]
    assert (recent["ttft"]["count"], recent["itl"]["count"], recent["ended"], recent["bad"]) == (1, 3, 1, 0)
    assert (recent["prompt_tokens"], recent["cached_tokens"]) == (5, 16)
    assert len(recent["ttft"]["series"]["p95"]) == 60
    assert "secret" not in answer.text
    assert str(list(request.prompt))[1:-1].replace(" ", "") not in answer.text


async def test_only_operators_look_and_act() -> None:
    async with served(gate()) as (running, client):
        assert (await client.get(DATA)).status_code == 401
        assert (await client.get(DATA, headers=bearer(ACME))).status_code == 403
        assert (await client.get(DATA, headers=bearer(ROOT))).status_code == 200
        body = {"program": "decode-0"}
        assert (await client.post(DRAIN, json=body, headers=ACT)).status_code == 401
        assert (await client.post(DRAIN, json=body, headers=ACT | bearer(ACME))).status_code == 403
        assert running.dispatcher.wishes == []
        done = await client.post(DRAIN, json=body, headers=ACT | bearer(ROOT))
        assert (done.status_code, done.json()) == (200, {"done": True})
        scaled = await client.post(SCALE, json={"pool": "prefill", "workers": 3}, headers=ACT | bearer(ROOT))
        assert scaled.status_code == 200
        assert running.dispatcher.wishes == [Drain("decode-0"), Scale("prefill", 3)]


async def test_without_keys_only_this_machine_acts_and_only_by_its_own_name() -> None:
    """A page from elsewhere whose name was made to point to 127.0.0.1 is of the same origin as the page here."""
    body = {"program": "decode-0"}
    async with served() as (running, client):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::1"):
            refused = await client.post(DRAIN, json=body, headers={**ACT, "host": host})
            assert refused.status_code == 403, host
        assert running.dispatcher.wishes == []
        for host in ("localhost", "127.0.0.1:8002", "[::1]:8002"):
            assert (await client.post(DRAIN, json=body, headers={**ACT, "host": host})).status_code == 200, host


async def test_another_page_cannot_act() -> None:
    """S: no form, no link, no script of another origin brings the header along without asking."""
    async with served() as (running, client):
        body = json.dumps({"program": "decode-0"})
        kinds = ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data")
        for kind in kinds:
            for extra in ({}, ACT):
                answer = await client.post(DRAIN, content=body, headers={"content-type": kind, **extra})
                assert answer.status_code in (400, 415)
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        preflight = await client.options(DRAIN, headers=asked | {"access-control-request-headers": "x-headrace-action"})
        assert preflight.status_code == 405
        assert not [name for name in preflight.headers if name.startswith("access-control")]
        assert (await client.get(DRAIN, headers=ACT)).status_code == 405
        assert running.dispatcher.wishes == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (DRAIN, "{}"),
        (DRAIN, "nonsense"),
        (DRAIN, '{"program": "router-0"}'),
        (DRAIN, '{"program": "decode-0; rm"}'),
        (DRAIN, '{"program": "decode-0", "force": true}'),
        (SCALE, '{"pool": "router", "workers": 1}'),
        (SCALE, '{"pool": "decode", "workers": -1}'),
        (SCALE, '{"pool": "decode", "workers": 1025}'),
        (SCALE, '{"pool": "decode", "workers": "3"}'),
        (SCALE, '{"pool": "decode", "workers": null}'),
        (SCALE, '{"pool": "decode", "workers": 1, "x": "' + "y" * 5000 + '"}'),
    ],
)
async def test_what_is_no_wish_is_refused(path: str, body: str) -> None:
    async with served() as (running, client):
        answer = await client.post(path, content=body, headers={"content-type": "application/json", **ACT})
        assert answer.status_code in (400, 413)
        assert running.dispatcher.wishes == []


async def test_what_the_cluster_cannot_do_is_told_and_what_takes_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "ANSWER_S", 0.05)
    async with served() as (running, client):
        running.dispatcher.problem = "'decode-9' does not run here"
        refused = await client.post(DRAIN, json={"program": "decode-9"}, headers=ACT)
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, running.dispatcher.problem)
        running.dispatcher.slowly = True
        slow = await client.post(SCALE, json={"pool": "decode", "workers": 2}, headers=ACT)
        assert (slow.status_code, slow.json()) == (202, {"done": False})
        assert running.dispatcher.wishes == [Drain("decode-9"), Scale("decode", 2)]
