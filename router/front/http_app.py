"""The HTTP API: OpenAI's routes and what operators look at. Inference itself is http_inference.py.

Every error has OpenAI's shape, unknown routes too. /openapi.json is our own document (openapi/), not FastAPI's. What
else OpenAI has under /v1 is refused by name, so that nobody takes it for a mistyped address.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.core.errors import HeadraceError, Unavailable
from router.front import bounds
from router.front.auth import Authenticate, Gate, only_operators, tenant_of
from router.front.dashboard.routes import Dashboard, add_dashboard
from router.front.door import FrontDoor
from router.front.errors_http import error_headers, error_object, error_shape, status_of
from router.front.http_debug import explain
from router.front.http_inference import inference_routes
from router.front.http_tokens import token_routes
from router.front.http_usage import answer_usage
from router.front.openai_shapes import Json, model_json
from router.front.openapi.document import document
from router.records import Recorder
from router.requests import Limits

ABSENT = {
    "assistants": "assistants", "audio": "audio", "batches": "batches", "containers": "containers",
    "conversations": "conversations", "embeddings": "embeddings", "evals": "evals", "files": "files",
    "fine_tuning": "fine-tuning", "images": "images", "moderations": "moderations", "organization": "administration",
    "realtime": "realtime sessions", "responses": "the responses API", "threads": "threads", "uploads": "uploads",
    "vector_stores": "vector stores", "videos": "videos",
}  # fmt: skip
"""First part of the path under /v1 -> what it would be."""


class GuardedApp(FastAPI):
    """Everything behind the gate. Posts to `endpoints` go straight to them: FastAPI's layers cost more than they do."""

    def __init__(self, gate: Gate, endpoints: Mapping[str, ASGIApp]) -> None:
        super().__init__(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self._endpoints = endpoints
        self._guarded = Authenticate(self._answer, gate)
        for path, endpoint in endpoints.items():  # for all that asks what routes there are; other methods get 405
            self.router.routes.append(Route(path, endpoint, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":  # as a GET, of whose answer the server sends the head alone
            scope = {**scope, "method": "GET"}
        endpoint = self._endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)


class Told(CollectorRegistry):
    """What was collected on the event loop, to be written elsewhere: of a large fleet it is half a megabyte of text."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def make_app(front: FrontDoor, recorder: Recorder, dashboard: Dashboard | None = None) -> FastAPI:
    """The ASGI app of one router. `recorder` knows its recent requests. `dashboard` None: there is none."""
    app = GuardedApp(front.gate, {**inference_routes(front), **token_routes(front)})
    _add_models(app, front)
    _add_operations(app, front, recorder)
    if dashboard is not None:
        add_dashboard(app, front, dashboard)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(HeadraceError, _our_error)
    return app


def _limits(front: FrontDoor) -> Limits | None:
    """None: what is known before any worker is must do."""
    try:
        return front.dispatcher.limits()
    except Unavailable:
        return None


def _add_models(app: FastAPI, front: FrontDoor) -> None:
    def served() -> Json:
        limits = _limits(front)
        return model_json(front.model_name, front.created, None if limits is None else limits.max_context)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [served()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        bounds.check_model(model, front.model_name)
        return _json(served())


def _add_operations(app: FastAPI, front: FrontDoor, recorder: Recorder) -> None:
    @lru_cache(maxsize=2)
    def described(workers: Limits | None) -> bytes:
        return orjson.dumps(document(version("headrace"), front.model_name, front.settings, workers))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(described(_limits(front)), media_type="application/json")

    @app.get("/live")
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/ready")
    @app.get("/health")  # asked by clients made for vLLM before they send anything
    async def ready() -> Response:
        reasons = front.not_ready_reasons()
        if not reasons:
            return _json({"ready": True})
        return _json({"ready": False, "reasons": reasons}, status=503, headers={"retry-after": "1"})

    @app.get("/metrics")
    async def metrics(request: HttpRequest) -> Response:
        only_operators(request.scope)
        told = Told(list(front.metrics.registry.collect()))
        return Response(await asyncio.to_thread(generate_latest, told), media_type=CONTENT_TYPE_LATEST)

    @app.get("/usage")
    async def usage(request: HttpRequest) -> Response:
        return await answer_usage(request, front.gate)

    @app.get("/debug/requests/{name}")
    async def recent(request: HttpRequest, name: str) -> Response:
        return _json(explain(recorder, name, tenant_of(request.scope), front.metrics.clock))

    @app.get("/status")
    async def status(request: HttpRequest) -> Response:
        only_operators(request.scope)
        return _json(front.dispatcher.status())


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Routing errors: 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{error.detail}: {request.method} {path}"
    code = "unknown_url" if error.status_code == 404 else None
    if code and (absent := ABSENT.get(path.removeprefix("/v1/").partition("/")[0])) and path.startswith("/v1/"):
        message, code = f"{absent}: not served here; a language model's completions are", "unsupported_endpoint"
    shape = error_shape(message, "invalid_request_error", code=code)
    return _json(shape, status=error.status_code, headers=dict(error.headers or {}))


async def _our_error(_: HttpRequest, error: Exception) -> Response:
    return _json(error_object(error), status=status_of(error), headers=error_headers(error))


def _json(value: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")
