"""Nobody comes in without a key, whatever the address looks like (FAULTS S04, S05); no key is repeated to anybody."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.routing import Route

from cluster.cli.keys import digest_of, new_key
from cluster.core.access import TenantSettings
from cluster.core.clock import SystemClock
from cluster.rpc import PublicDoor, make_server, service
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from router.front.auth import OPEN, Gate
from router.front.dashboard.paths import DATA, DRAIN, FILES, SCALE
from router.front.dashboard.routes import Dashboard
from router.front.grpc_service import InferenceService
from router.front.http_app import make_app
from router.permits import Permits
from router.records import record_of
from router.requests import Request, Trace
from router.tenants import Tenants
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, Served, make_front, serve
from tests.integration.stack import connect, request_head

ACME, OTHER, ROOT = (new_key() for _ in range(3))
NO_HTTP = b"Invalid HTTP request received."  # what the server's parser does not take never reaches us
OPERATOR_ROUTES = {"/metrics", "/status", DATA, DRAIN, SCALE}
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


def gate(**limits: int) -> Gate:
    def tenant(key: str, **more: object) -> TenantSettings:
        return TenantSettings.model_validate({"keys": [digest_of(key)], **more})

    tenants = {"acme": tenant(ACME, **limits), "other": tenant(OTHER), "root": tenant(ROOT, operator=True)}
    return Gate(Tenants(tenants, "the cluster's secret"), Permits(SystemClock()))


@asynccontextmanager
async def guarded(**limits: int) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async with (
        serve(FakeDispatcher(say("abc")), gate=gate(**limits)) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        yield served, client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes() -> list[tuple[str, str]]:
    """Every (method, path) there is."""
    dispatcher = FakeDispatcher(say("x"))
    app = make_app(make_front(dispatcher), dispatcher, Dashboard(dispatcher, dispatcher.fulfil))
    found = []
    for route in app.router.routes:
        assert isinstance(route, Route), "another kind of route needs a look here"
        path = route.path.replace("{model:path}", MODEL).replace("{name}", "nobody")
        assert "{" not in path, "give this parameter a value here"
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


def spellings(path: str) -> Iterator[str]:
    """Other ways to write a path, by which a rule about prefixes is got round."""
    yield path
    yield "/" + path
    yield path.replace("/", "//")
    yield path + "/"
    yield path.upper()
    yield path.title()
    yield "/." + path
    yield "/live/.." + path
    yield "/live/%2e%2e" + path
    yield "/live%2f.." + path
    yield path + "%00"
    yield path + "/%2e"
    yield path + ";/live"
    yield path + "?/live"
    yield path + "#/live"
    yield "".join(f"%{ord(c):02x}" for c in path)
    yield quote(path, safe="")
    yield "http://elsewhere" + path
    yield path + "%ff"


async def test_every_route_in_every_spelling_needs_a_key() -> None:
    asked = 0
    async with guarded() as (served, _):
        for method, path in routes():
            for spelling in spellings(path):
                async with connect(served.url) as line:
                    await line.send(request_head(method, spelling, {"content-length": "0"}))
                    answer = await line.answer()
                allowed = path in OPEN and method in ("GET", "HEAD")
                refused = answer.status == 401 or answer.body == NO_HTTP
                assert refused or (allowed and answer.status in (200, 404)), (method, spelling, answer)
                asked += 1
        assert served.dispatcher.requests == []
    assert asked > 100


async def test_probes_have_no_key_and_cannot_do_anything_else() -> None:
    async with guarded() as (_, client):
        for path in sorted(OPEN):
            assert (await client.get(path)).status_code == 200
            assert (await client.post(path)).status_code == 401
    assert sorted(OPEN - set(FILES)) == ["/health", "/live", "/ready"], "a longer list needs a reason"


async def test_what_a_tenant_may_see_is_a_list() -> None:
    """A new route that shows more than a tenant's own work is an operator's, or this test says so (FAULTS S05)."""
    async with guarded() as (_, client):
        for method, path in routes():
            mine = (await client.request(method, path, headers=bearer(ACME))).status_code
            roots = (await client.request(method, path, headers=bearer(ROOT))).status_code
            assert (mine == 403) == (path in OPERATOR_ROUTES), (method, path, mine)
            assert roots not in (401, 403)
        told = (await client.get("/status", headers=bearer(ACME))).json()["error"]
        assert (told["type"], told["code"]) == ("permission_error", "insufficient_permissions")
        for nothing in ("/abort", "/flush", "/workers", "/v1/../admin", "/scale"):
            assert (await client.post(nothing, headers=bearer(ACME))).status_code in (404, 405)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": ACME},
        {"authorization": f"Basic {ACME}"},
        {"authorization": f"Bearer {ACME}x"},
        {"authorization": f"Bearer {ACME[:-1]}"},
        {"authorization": f"Bearer {digest_of(ACME)}"},
        {"authorization": f"Bearer {ACME} {ACME}"},
        {"authorization": f"Bearer {ACME},{OTHER}"},
        {"authorization": "Bearer " + "x" * 5000},
        {"x-api-key": ACME},
        {"api-key": ACME},
    ],
)
async def test_what_is_no_key(header: dict[str, str]) -> None:
    async with guarded() as (served, client):
        refused = await client.post("/v1/completions", json=BODY, headers=header)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert ACME not in refused.text
        assert served.dispatcher.requests == []


async def test_two_headers_are_no_key() -> None:
    async with guarded() as (_, client):
        twice = [("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {OTHER}")]
        assert (await client.post("/v1/completions", json=BODY, headers=twice)).status_code == 401


async def test_a_key_is_a_tenant_and_its_salt() -> None:
    async with guarded() as (served, client):
        for header in (bearer(ACME), {"Authorization": f"bearer  {OTHER}"}, bearer(ACME)):
            assert (
                await client.post("/v1/completions", json={**BODY, "priority": -3}, headers=header)
            ).status_code == 200
        one, other, again = served.dispatcher.requests
    assert [request.tenant for request in (one, other, again)] == ["acme", "other", "acme"]
    assert one.salt == again.salt != other.salt
    assert len(one.salt) == len(other.salt) == 16
    assert one.priority == -3


async def test_salts_outlive_a_router_and_need_the_secret() -> None:
    def salts(secret: str | None) -> list[bytes]:
        settings = TenantSettings(keys=(digest_of(ACME),))
        return [Tenants({name: settings}, secret).authenticate(f"Bearer {ACME}").salt for name in ("acme", "other")]

    assert salts("s") == salts("s")
    assert len({*salts("s"), *salts("t"), *salts(None)}) == 6


async def test_without_tenants_everything_is_open_and_one_tenant() -> None:
    async with serve(FakeDispatcher(say("abc"))) as served, httpx.AsyncClient(base_url=served.url) as client:
        for path in ("/metrics", "/status", "/live"):
            assert (await client.get(path)).status_code == 200
        await client.post("/v1/completions", json=BODY, headers=bearer("anything"))
        (request,) = served.dispatcher.requests
    assert (request.tenant, request.salt, request.priority) == ("", b"", 0)


async def test_the_openai_client_sees_its_own_errors() -> None:
    async with guarded(requests_per_minute=1) as (served, _):
        wrong = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
        right = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=ACME, max_retries=0)
        async with wrong, right:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
            answer = await right.completions.create(model=MODEL, prompt="hello", max_tokens=3)
            assert answer.choices[0].text == "abc"
            with pytest.raises(openai.RateLimitError) as limited:
                await right.completions.create(model=MODEL, prompt="hello", max_tokens=3)
        assert limited.value.code == "rate_limit_exceeded"
        assert 55 <= int(limited.value.response.headers["retry-after"]) <= 60
        assert served.outcomes("completions") == {"ok": 1.0, "limited": 1.0}


async def test_a_full_queue_is_told_before_the_body_is_understood() -> None:
    async with guarded() as (served, client):
        served.dispatcher.full = True
        refused = await client.post("/v1/completions", content=b"{", headers=bearer(ACME))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert refused.json()["error"]["code"] == "overloaded"


async def test_grpc_needs_a_key_for_everything_but_health() -> None:
    front = make_front(FakeDispatcher(say("abc")), gate=gate())
    ours = service(pb.DESCRIPTOR, "Inference", add_InferenceServicer_to_server, InferenceService(front))
    server = make_server("127.0.0.1", 0, [ours], PublicDoor(front.gate.allows))
    await server.start()
    hello = pb.GenerateRequest(prompt="hello", max_tokens=3)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = InferenceStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        for metadata in (
            (),
            metadata_of("wrong"),
            (*metadata_of(ACME), *metadata_of(OTHER)),
            (("authorization", ACME),),
        ):
            calls = (
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                anext(aiter(stub.Generate(hello, metadata=metadata))),
                anext(aiter(reflection.ServerReflectionInfo(iter([listing]), metadata=metadata))),
                channel.unary_unary("/headrace.v1.Inference/Nothing", bytes, bytes)(b"", metadata=metadata),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert ACME not in str(refused.value.details())
        assert front.gate.tenants.refused == 4 * len(calls)
        health = health_pb2_grpc.HealthStub(channel)
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        good = metadata_of(ACME)
        assert len((await stub.ListModels(pb.ListModelsRequest(), metadata=good)).models) == 1
        hello.priority = -7
        assert [event async for event in stub.Generate(hello, metadata=good)]
        (answer,) = [r async for r in reflection.ServerReflectionInfo(iter([listing]), metadata=good)]
        assert len(answer.list_services_response.service) == 3
    await server.stop(0)
    assert [(request.tenant, request.priority) for request in front.dispatcher.requests] == [("acme", -7)]  # type: ignore[attr-defined]


def metadata_of(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_no_key_is_logged_or_measured(caplog: pytest.LogCaptureFixture) -> None:
    """Right, wrong and malformed ones, and the digests they have."""
    caplog.set_level(logging.DEBUG)
    tried = [ACME, "wrong-" + ACME, ROOT]
    async with guarded(requests_per_minute=1) as (_, client):
        for key in tried:
            for _ in range(2):
                await client.post("/v1/completions", json=BODY, headers=bearer(key))
            await client.get("/v1/nothing", headers={"authorization": key})
        metrics = (await client.get("/metrics", headers=bearer(ROOT))).text
        status = (await client.get("/status", headers=bearer(ROOT))).text
    told = caplog.text + metrics + status
    assert 'outcome="limited"' in metrics
    assert "headrace_unauthenticated_total 5.0" in metrics.splitlines()
    for key in tried:
        assert key not in told
        assert hashlib.sha256(key.encode()).hexdigest() not in told


async def test_a_request_is_known_to_its_tenant_and_to_operators_alone() -> None:
    """S05: what is another's looks like what never was."""
    async with guarded() as (served, client):
        request = Request("r1", "mine", (1, 2, 3), 4, tenant="acme")
        served.dispatcher.known.append(record_of(request, Trace(), 0.0))
        answers = {key: await client.get("/debug/requests/mine", headers=bearer(key)) for key in (ACME, OTHER, ROOT)}
        never = await client.get("/debug/requests/never", headers=bearer(OTHER))
    assert {key: answer.status_code for key, answer in answers.items()} == {ACME: 200, OTHER: 404, ROOT: 200}
    assert answers[OTHER].json() == never.json()
