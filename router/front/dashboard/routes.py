"""The dashboard's routes, all at the admin listener (router/web.py)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.front.auth import only_operators
from router.front.dashboard.actions import Actions, DrainBody, Fulfil, ScaleBody
from router.front.dashboard.assets import HEADERS, Asset, load_assets
from router.front.dashboard.data import dashboard_json
from router.front.dashboard.paths import DATA, DRAIN, SCALE
from router.front.door import FrontDoor
from router.front.openai_shapes import Json
from router.overview import Overseer


@dataclass(frozen=True, slots=True)
class Dashboard:
    """What it shows, and who does what operators want."""

    overseer: Overseer
    fulfil: Fulfil


def add_dashboard(app: FastAPI, front: FrontDoor, dashboard: Dashboard) -> None:
    """The page, its data and its actions; nothing of the page where nobody kept what it shows."""
    recent = front.metrics.recent
    if recent is None:
        return
    for path, asset in load_assets().items():
        app.router.routes.append(Route(path, _serving(asset), methods=["GET"]))
    actions = Actions(front.settings, dashboard.fulfil, lambda: not front.gate.tenants.configured)

    @app.get(DATA)
    async def data(request: HttpRequest) -> Response:
        only_operators(request.scope)
        return _json(dashboard_json(front, recent, dashboard.overseer.overview()))

    @app.post(DRAIN)
    async def drain(request: HttpRequest) -> Response:
        status, answer = await actions.act(request.scope, request.receive, DrainBody)
        return _json(answer, status)

    @app.post(SCALE)
    async def scale(request: HttpRequest) -> Response:
        status, answer = await actions.act(request.scope, request.receive, ScaleBody)
        return _json(answer, status)


def _serving(asset: Asset) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def serve(_: HttpRequest) -> Response:
        return Response(asset.body, headers=HEADERS, media_type=asset.media_type)

    return serve


def _json(value: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, {"cache-control": "no-store"}, "application/json")
