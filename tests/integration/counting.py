"""A front door whose answers are counted in a book that tests can look into."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx

from cluster.cli.keys import digest_of, new_key
from cluster.core.access import TenantSettings
from cluster.core.clock import SystemClock
from cluster.core.config import UsageSettings
from cluster.usage import Closed, Day, LocalUsage, Rows, Sums, UsageUnavailable, Who, day_of
from router.front.auth import Gate
from router.ledger import Ledger
from router.permits import Permits
from router.requests import Limits
from router.tenants import Tenants
from tests.fakes.dispatcher import DEFAULT_LIMITS, FakeDispatcher, Script
from tests.integration.front_door_server import MODEL, Served, serve

PATH = "/v1/completions"
PROMPT = "How deep is the headrace, please?"
CACHED = 16  # the fake dispatcher's
PATIENCE_S = 10.0
LARGE = replace(DEFAULT_LIMITS, max_context=4096, pool_tokens=8192)
KEYS = {name: new_key() for name in ("acme", "other", "root")}
PRICES = {"currency": "EUR", "prices": {MODEL: {"input": "2.5", "cached": "0.25", "output": "10"}}}


class Book(LocalUsage):
    """Shared, as routers see it: whoever has the end of an answer is in it. `hold`: it does not answer yet; `away`:
    it cannot be read."""

    def __init__(self) -> None:
        clock = SystemClock()
        super().__init__(lambda: day_of(clock.wall()))
        self.hold: asyncio.Event | None = None
        self.away = False
        self.read_days: list[tuple[Day, Day]] = []
        self.asked = asyncio.Event()

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        return await super().write(epoch, day, rows)

    async def read(self, since: Day, until: Day) -> dict[Day, dict[Who, Sums]]:
        self.read_days.append((since, until))
        if self.away:
            raise UsageUnavailable("usage: away")
        return await super().read(since, until)

    async def sums(self, tenant: str = "") -> Sums:
        """Of one tenant, over all days."""
        days = await super().read(0, 100_000)
        every = [sums for rows in days.values() for who, sums in rows.items() if who == Who(tenant, MODEL)]
        total = Sums()
        for each in every:
            total = total.plus(each)
        return total


@asynccontextmanager
async def counting(
    script: Script, *, shared: bool = True, tenants: bool = False, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[tuple[Served, httpx.AsyncClient, Book]]:
    """A front door whose ledger writes to a book; all is written once it is left."""
    book = Book()
    ledger = Ledger(SystemClock(), book, epoch=7, shared=shared)
    known = {name: TenantSettings(keys=(digest_of(key),), operator=name == "root") for name, key in KEYS.items()}
    gate = Gate(
        Tenants(known if tenants else {}, "secret"),
        Permits(SystemClock()),
        UsageSettings.model_validate(PRICES),
        ledger,
    )
    serving = asyncio.create_task(ledger.serve())
    async with (
        serve(FakeDispatcher(script, limits), gate=gate) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        yield served, client, book
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def ask(client: httpx.AsyncClient, **more: object) -> tuple[list[str], dict[str, int]]:
    """The choices' texts and the usage that the answer told."""
    body = {"model": MODEL, "prompt": PROMPT, "stream_options": {"include_usage": True}, **more}
    if not body.get("stream"):
        del body["stream_options"]
        said = (await client.post(PATH, json=body)).json()
        return [choice["text"] for choice in said["choices"]], said["usage"]
    texts: dict[int, str] = {}
    usage: dict[str, int] = {}
    async with client.stream("POST", PATH, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)], usage
