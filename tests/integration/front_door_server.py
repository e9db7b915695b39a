"""A front door over a fake dispatcher, served by uvicorn on a free port in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import uvicorn
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from cluster.core.clock import SystemClock
from cluster.core.config import RouterSettings
from router.front.auth import Gate
from router.front.dashboard.routes import Dashboard
from router.front.door import FrontDoor
from router.front.grammar_judge import GrammarJudge
from router.front.http_app import make_app
from router.front.metrics import FrontMetrics
from router.front.model_text import ModelText, load_model_text
from router.front.recent import Recent
from router.requests import Grammar
from tests.fakes.dispatcher import FakeDispatcher

MODEL = "tracer"


class PassingJudge(GrammarJudge):
    """For clients in process that give each request an event loop of its own: its process ends with the request."""

    async def check(self, grammar: Grammar, param: str, tenant: str = "") -> None:
        try:
            await super().check(grammar, param, tenant)
        finally:
            await self.close()


def passing_text() -> ModelText:
    """The tracer's text, with a judge for event loops that pass."""
    return replace(load_model_text(None), grammars=PassingJudge(()))


class _Server(uvicorn.Server):
    """Tells when it listens, so nobody has to poll."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets=None)
        self.listening.set()


@dataclass(frozen=True)
class Served:
    """A running front door."""

    front: FrontDoor
    dispatcher: FakeDispatcher
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def outcomes(self, api: str) -> dict[str, float]:
        return outcomes(self.front, api)


def outcomes(front: FrontDoor, api: str) -> dict[str, float]:
    """Outcome -> count, of those that happened."""
    family = next(iter(front.metrics.requests.collect()))
    return {
        sample.labels["outcome"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["api"] == api and sample.value
    }


def make_front(
    dispatcher: FakeDispatcher,
    settings: RouterSettings | None = None,
    text: ModelText | None = None,
    gate: Gate | None = None,
) -> FrontDoor:
    clock = SystemClock()
    metrics = FrontMetrics(CollectorRegistry(), clock, Recent())
    words = text or load_model_text(None)
    return FrontDoor(settings or RouterSettings(), MODEL, words, dispatcher, clock, metrics, gate)


@asynccontextmanager
async def serve(
    dispatcher: FakeDispatcher,
    settings: RouterSettings | None = None,
    text: ModelText | None = None,
    gate: Gate | None = None,
) -> AsyncIterator[Served]:
    front = make_front(dispatcher, settings, text, gate)
    app = make_app(front, dispatcher, Dashboard(dispatcher, dispatcher.fulfil))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield Served(front, dispatcher, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task
