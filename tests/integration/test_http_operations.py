"""What operators look at, and routes that do not exist."""

import asyncio
import io
from dataclasses import replace

import httpx
import openai
import pytest
from rich.console import Console

from cluster.cli.explain import find, show
from cluster.cli.start import _LATE, wait_until_served
from cluster.controller import ClusterStatus
from cluster.core.clock import SystemClock
from cluster.core.errors import HeadraceError
from cluster.pipe import Ready
from cluster.supervisor import ProgramStatus
from router.placement import Considered, Placement, Shape, WorkerLoad
from router.records import record_of
from router.requests import Request, Trace
from tests.fakes.dispatcher import FakeDispatcher, Step, say
from tests.integration.front_door_server import MODEL, serve


async def test_models() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, served.openai() as client:
        models = await client.models.list()
        one = await client.models.retrieve(MODEL)
        dispatcher.available = False
        assert [model.id async for model in client.models.list()] == [MODEL]
        async with httpx.AsyncClient() as raw:
            missing = await raw.get(f"{served.url}/v1/models/some/other")
    assert models.data == [one]
    assert one.model_dump()["max_model_len"] == 512
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_ready_tells_why_not() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
        assert (await client.get("/ready")).json() == {"ready": True}
        dispatcher.available = False
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "reasons": ["no decode worker is known"]}
        assert (await client.get("/live")).status_code == 200
        refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"


async def test_who_starts_a_cluster_is_told_when_requests_are_taken() -> None:
    """A first question that came as soon as every program was up found a router that had not met the workers yet."""
    dispatcher = FakeDispatcher(say("x"))
    dispatcher.available = False
    async with serve(dispatcher) as served:
        told = Ready(name="router-0", role="router", address="", epoch=1, http=served.url)
        router = ProgramStatus("router-0", "router", 1, 1, "ready", told, 7)
        nobody = Ready(name="router-0", role="router", address="", epoch=1, http="http://127.0.0.1:9")
        status = ClusterStatus(1, {"decode": 1, "router": 1}, (router,), ())
        assert await asyncio.to_thread(wait_until_served, status, 0.3) == {"router-0": _LATE}
        waiting = asyncio.create_task(asyncio.to_thread(wait_until_served, status, 30.0))
        dispatcher.available = True
        assert await waiting == {}
        gone = replace(status, programs=(replace(router, ready=nobody),))
        assert await asyncio.to_thread(wait_until_served, gone, 0.3) == {"router-0": _LATE}
        without_decode = replace(gone, desired={"decode": 0, "router": 1})
        assert await asyncio.to_thread(wait_until_served, without_decode, 30.0) == {}, "there is nothing to wait for"


async def test_a_draining_door_sends_new_requests_elsewhere_and_lets_streams_end() -> None:
    going_on = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [*say("ab", end=False)(request), going_on, *say("c")(request)]

    async with serve(FakeDispatcher(script)) as served, httpx.AsyncClient(base_url=served.url) as client:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert "a" in await anext(lines)
            served.front.draining = True
            refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "unavailable"
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert (await client.get("/live")).status_code == 200
            going_on.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_status_and_metrics() -> None:
    async with serve(FakeDispatcher(say("abc"))) as served, httpx.AsyncClient(base_url=served.url) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
        await client.post("/v1/completions", json={"model": MODEL})
        assert (await client.get("/status")).json()["workers"]["d0"]["free_blocks"] == 7
        lines = (await client.get("/metrics")).text.splitlines()
    for line in (
        'headrace_requests_total{api="completions",outcome="ok"} 1.0',
        'headrace_requests_total{api="completions",outcome="client_error"} 1.0',
        'headrace_ttft_seconds_count{api="completions"} 1.0',
        'headrace_itl_seconds_count{api="completions"} 3.0',
        'headrace_e2e_seconds_count{api="completions"} 1.0',
        "headrace_prompt_tokens_total 5.0",
        "headrace_cached_tokens_total 16.0",
        "headrace_output_tokens_total 4.0",
        "headrace_requests_in_flight 0.0",
        'headrace_tpot_seconds_count{api="completions"} 1.0',
        'headrace_worker_blocks{pool="decode",state="free",worker="d0"} 2.0',
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "//v1/completions", 404),
        ("POST", "/V1/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_other_routes_have_openai_s_errors(method: str, path: str, status: int) -> None:
    async with serve(FakeDispatcher(say("x"))) as served, httpx.AsyncClient() as client:
        response = await client.request(method, served.url + path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (response.headers.get("allow") is not None) == (status == 405)


async def test_what_can_be_read_has_a_head() -> None:
    """Probes of load balancers ask for no more."""
    async with serve(FakeDispatcher(say("x"))) as served, httpx.AsyncClient(base_url=served.url) as client:
        for path in ("/live", "/ready", "/health", "/v1/models", f"/v1/models/{MODEL}"):
            head, whole = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-length"] == str(len(whole.content))
        assert [(await client.head(path)).status_code for path in ("/v1/completions", "/nothing")] == [405, 404]


async def test_what_else_openai_has_is_refused_by_name() -> None:
    async with serve(FakeDispatcher(say("x"))) as served, served.openai() as client:
        with pytest.raises(openai.NotFoundError, match="embeddings: not served here") as embeddings:
            await client.embeddings.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError, match="the responses API") as responses:
            await client.responses.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError, match="fine-tuning") as tuning:
            await client.fine_tuning.jobs.list()
        with pytest.raises(openai.NotFoundError, match="Not Found: GET /v1/embedding") as mistyped:
            await client.get("/embedding", cast_to=object)
    assert {error.value.code for error in (embeddings, responses, tuning)} == {"unsupported_endpoint"}
    assert mistyped.value.code == "unknown_url"


async def test_a_recent_request_is_explained_without_its_text() -> None:
    request = Request("ours", "req-7", prompt=(72, 105), max_tokens=3)
    trace = Trace("p0", "d0", attempts=1, cached_tokens=16, kv_bytes=4096, transport="shm", timings_ms={"queue": 1.5})
    record = record_of(request, trace, SystemClock().now())
    worker = WorkerLoad("", "d0", 1, Shape(1, (1, 1, 2, 16, "x"), b""), 64, 64)
    pairs = (Considered("d0", "p0", {"decode": 1.0, "prefill": 2.5}), Considered("d1", "", {"prefill": 9.0}))
    attempt = record.placed(Placement(worker, (replace(worker, name="p0"),), False, 64, 3.5, pairs), record.arrived)
    record.attempt_ended(attempt, "ok", record.arrived + 0.25)
    dispatcher = FakeDispatcher(say("x"))
    dispatcher.known.append(record)
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
        told = await client.get("/debug/requests/req-7")
        assert (await client.get("/debug/requests/ours")).json() == told.json()
        missing = await client.get("/debug/requests/req-8")
        shown = io.StringIO()
        show(await asyncio.to_thread(find, "req-7", [served.url]), Console(file=shown, width=200))
        with pytest.raises(HeadraceError, match="none of 2 routers knows a recent request 'req/8'"):
            await asyncio.to_thread(find, "req/8", [served.url, served.url])
    assert told.json()["attempts"][0]["considered"][0] == {
        "decode": "d0", "prefill": "p0", "cost_ms": 3.5, "terms_ms": {"decode": 1.0, "prefill": 2.5}
    }  # fmt: skip
    assert (told.json()["outcome"], told.json()["attempts"][0]["ended_ms"]) == ("running", 250.0)
    assert "Hi" not in told.text
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["chosen", "d0", "p0", "3.5", "1.0", "2.5"] in lines
    assert ["d1", "local", "9.0", "-", "9.0"] in lines
