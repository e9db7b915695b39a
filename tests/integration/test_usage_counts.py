"""What is counted is what was handed to clients: streamed or whole, several samples and prompts, cut at any point."""

import asyncio
import csv
import io
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from decimal import Decimal
from typing import ClassVar

import httpx
import pytest

from cluster.cli.keys import digest_of, new_key
from cluster.cli.usage import fetch
from cluster.config import API_KEY_VARIABLE
from cluster.core.access import PublicTlsSettings, TenantSettings
from cluster.core.clock import ManualClock, SystemClock
from cluster.core.config import UsageSettings
from cluster.core.errors import HeadraceError, Overloaded, RequestFailed
from cluster.usage import Closed, Day, LocalUsage, Rows, Sums, Who, day_of, iso
from router.front.auth import Gate
from router.front.door import FrontDoor
from router.front.model_text import ModelText
from router.front.text import Delta
from router.front.usage import Receipt
from router.ledger import Ledger
from router.permits import Permits
from router.requests import Limits, TokenEvent, Trace
from router.tenants import Tenants
from tests.fakes.dispatcher import DEFAULT_LIMITS, FakeDispatcher, Script, Step, say
from tests.integration.front_door_server import MODEL, Served, serve
from tests.integration.stack import connect, post_bytes

PATH = "/v1/completions"
PROMPT = "How deep is the headrace, please?"
CACHED = 16  # the fake dispatcher's
PATIENCE_S = 10.0
LARGE = replace(DEFAULT_LIMITS, max_context=4096, pool_tokens=8192)
KEYS = {name: new_key() for name in ("acme", "other", "root")}
PRICES = {"currency": "EUR", "prices": {MODEL: {"input": "2.5", "cached": "0.25", "output": "10"}}}


class Book(LocalUsage):
    """Shared, as routers see it: whoever has the end of an answer is in it. `hold`: it does not answer yet."""

    def __init__(self) -> None:
        clock = SystemClock()
        super().__init__(lambda: day_of(clock.wall()))
        self.hold: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        return await super().write(epoch, day, rows)

    async def sums(self, tenant: str = "") -> Sums:
        """Of one tenant, over all days."""
        days = await self.read(0, 100_000)
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


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_sums_are_what_the_answer_says(stream: bool, n: int, shared: bool) -> None:
    async with counting(say("Fünf Fuß 🏞", per_event=3), shared=shared) as (_, client, book):
        texts, usage = await ask(client, stream=stream, n=n)
        here = await book.sums() if shared else None
    assert texts == ["Fünf Fuß 🏞"] * n
    expected = Sums(1, usage["prompt_tokens"], CACHED, usage["completion_tokens"], len(PROMPT), sum(map(len, texts)))
    assert await book.sums() == expected
    assert here in (expected, None), "a shared book has it before the client has the end"


async def test_several_prompts_are_one_request_and_an_echo_is_not_written() -> None:
    prompts = [PROMPT, "short", "a third one"]
    async with counting(say("abc")) as (_, client, book):
        texts, usage = await ask(client, prompt=prompts, n=2, echo=True)
    assert texts == [prompt + "abc" for prompt in prompts for _ in range(2)]
    characters = len("".join(prompts))
    cached = sum(min(CACHED, len(prompt)) for prompt in prompts)
    assert await book.sums() == Sums(1, usage["prompt_tokens"], cached, usage["completion_tokens"], characters, 18)


async def test_ids_count_by_the_text_they_stand_for_and_messages_by_what_they_say() -> None:
    async with counting(say("ok")) as (_, client, book):
        await ask(client, prompt=list("Grüße".encode()))
        first = await book.sums()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "你好"}]}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert first == Sums(1, 7, 7, 3, 5, 2)
    both = await book.sums()
    assert (both.input_characters, both.output_characters) == (7, 4)
    assert both.input_tokens == 7 + usage["prompt_tokens"]


class Watched(ModelText):
    """Says when it makes text of ids, and in which thread."""

    made: ClassVar[list[threading.Thread]] = []

    def text_of(self, ids: Sequence[int], *, special: bool) -> str:
        self.made.append(threading.current_thread())
        return super().text_of(ids, special=special)


def watched(front: FrontDoor) -> list[threading.Thread]:
    """The threads in which text is made of ids from now on."""
    text = front.text
    front.text = Watched(**{each.name: getattr(text, each.name) for each in fields(text)})
    Watched.made.clear()
    return Watched.made


@pytest.mark.parametrize("stream", [True, False])
async def test_of_a_long_prompt_of_ids_characters_are_counted_beside_its_answer(stream: bool) -> None:
    ids = list(("ü" * 600).encode())
    async with counting(say("abc"), limits=LARGE) as (served, client, book):
        made = watched(served.front)
        await ask(client, prompt=ids, stream=stream)
        assert await book.sums() == Sums(1, 1200, CACHED, 4, 600, 3), "in the book before the client has the end"
    assert [thread is threading.main_thread() for thread in made] == [False]


async def test_nobody_counts_characters_of_what_is_not_answered() -> None:
    """No refusal waits for it, and no first token."""
    forever = asyncio.Event()
    async with counting(lambda _: [forever], limits=LARGE) as (served, client, book):
        made = watched(served.front)
        served.dispatcher.refusal = Overloaded("full", retry_after_s=1.0)
        for prompt in ([65], [65] * 1200):
            assert (await client.post(PATH, json={"model": MODEL, "prompt": prompt})).status_code == 429
        served.dispatcher.refusal = None
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(
                post_bytes(PATH, json.dumps({"model": MODEL, "prompt": [65], "stream": True}).encode())
            )
            await served.dispatcher.until_active(1)
            connection.leave()
            await served.dispatcher.until_active(0)
    assert made == []
    assert await book.sums() == Sums()


async def test_whose_client_left_while_its_prompt_was_counted_is_charged_for_it() -> None:
    told: list[Sums] = []
    counting_it, receipt = threading.Event(), Receipt(told.append)

    def characters() -> int:
        counting_it.wait()
        return 600

    receipt.opened(0, 1, tokens=1200, characters=characters, trace=Trace(cached_tokens=7))
    receipt.hold(Delta(0, "A", (65,)))
    receipt.handed(0)
    receipt.close()
    assert told == [Sums(1, 1200, 7, 1, 0, 1)]
    counting_it.set()
    await receipt.known()
    assert told[1:] == [Sums(input_characters=600)]


async def test_a_prompt_that_was_only_read_counts() -> None:
    async with counting(say("")) as (_, client, book):
        await ask(client, max_tokens=0, echo=True)
    assert await book.sums() == Sums(1, len(PROMPT), CACHED, 0, len(PROMPT), 0)


@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_who_leaves_a_stream_is_charged_for_what_was_handed_over(tokens: int) -> None:
    forever = asyncio.Event()
    steps: list[Step] = [*[TokenEvent(0, (65,))] * tokens, forever]
    async with (
        counting(lambda _: steps) as (served, _, book),
        connect(served.url) as connection,
        asyncio.timeout(PATIENCE_S),
    ):
        await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()))
        await served.dispatcher.until_active(1)
        while connection.received.count(b'"text":"A"') < tokens:
            await connection.receive(len(connection.received) + 1)
        connection.leave()
        await served.dispatcher.until_active(0)
    assert await book.sums() == (Sums(1, 1, 1, tokens, 1, tokens) if tokens else Sums())


async def test_who_leaves_before_a_whole_answer_got_nothing() -> None:
    forever = asyncio.Event()
    async with counting(lambda _: [TokenEvent(0, (65, 66)), forever]) as (served, _, book):
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x"}).encode()))
            await served.dispatcher.until_active(1)
            connection.leave()
            await served.dispatcher.until_active(0)
        written = served.front.metrics.registry.get_sample_value("headrace_output_tokens_total")
    assert await book.sums() == Sums()
    assert written == 2, "the work is in other metrics"


async def test_a_stream_that_breaks_counts_until_there_and_what_was_refused_does_not() -> None:
    steps: list[Step] = [TokenEvent(0, (65, 66)), RequestFailed("a worker is gone")]
    async with counting(lambda _: steps) as (served, client, book):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(PATH, json=body)
        served.dispatcher.refusal = Overloaded("full", retry_after_s=1.0)
        assert (await client.post(PATH, json=body)).status_code == 429
        assert (await client.post(PATH, json={**body, "n": 0})).status_code == 400
    assert await book.sums() == Sums(1, len(PROMPT), CACHED, 2, len(PROMPT), 2)


async def test_text_that_is_held_back_is_not_handed_over_until_it_shows() -> None:
    """Half a character, and the start of what may be a stop string."""
    forever = asyncio.Event()
    half = "é".encode()[:1]
    steps: list[Step] = [TokenEvent(0, (65,)), TokenEvent(0, tuple(half)), forever]
    async with (
        counting(lambda _: steps) as (served, _, book),
        connect(served.url) as connection,
        asyncio.timeout(PATIENCE_S),
    ):
        await connection.send(post_bytes(PATH, json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()))
        await connection.receive(1)
        while b'"text":"A"' not in connection.received:
            await connection.receive(len(connection.received) + 1)
        connection.leave()
        await served.dispatcher.until_active(0)
    assert (await book.sums()).output_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_no_client_has_the_end_before_the_book_has_the_request(stream: bool) -> None:
    """The last byte waits. A client that has it is in the book, whatever becomes of this router."""
    async with counting(say("abc")) as (served, _, book):
        book.hold = asyncio.Event()
        async with connect(served.url) as connection, asyncio.timeout(PATIENCE_S):
            body = {"model": MODEL, "prompt": "x", "stream": stream}
            await connection.send(post_bytes(PATH, json.dumps(body).encode()))
            await book.asked.wait()
            while b"abc"[-1:] not in connection.received or (not stream and b'"usage"' not in connection.received):
                await connection.receive(len(connection.received) + 1)
            assert b"[DONE]" not in connection.received
            book.hold.set()
            answer = await connection.answer()
            here = await book.sums()
        assert answer.whole
        assert here.requests == 1
        if not stream:
            assert answer.json["usage"]["completion_tokens"] == 4


async def test_a_tenant_is_told_its_own_and_an_operator_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting(say("abc"), tenants=True) as (served, client, _):
        for name, count in (("acme", 2), ("other", 1)):
            for _ in range(count):
                await client.post(PATH, json={"model": MODEL, "prompt": PROMPT}, headers=bearer(name))
        all_of_it = (await client.get("/usage", headers=bearer("root"))).json()
        own = (await client.get("/usage", headers=bearer("acme"))).json()
        table = await client.get("/usage", headers={**bearer("root"), "accept": "text/csv"})
        metrics = (await client.get("/metrics", headers=bearer("root"))).text.splitlines()
        monkeypatch.setenv(API_KEY_VARIABLE, KEYS["root"])
        lines = await asyncio.to_thread(fetch, [served.url], None, None, PublicTlsSettings())
        with pytest.raises(HeadraceError, match="must be a day like"):
            await asyncio.to_thread(fetch, [served.url], "yesterday", None, PublicTlsSettings())
    acme, other = all_of_it["rows"]
    assert (acme["tenant"], other["tenant"]) == ("acme", "other")
    assert own["rows"] == [acme]
    assert (acme["requests"], acme["input_tokens"], acme["cached_tokens"], acme["output_tokens"]) == (2, 66, 32, 8)
    cost = (Decimal("2.5") * (66 - 32) + Decimal("0.25") * 32 + 10 * 8) / 1_000_000
    assert (Decimal(acme["cost"]), acme["currency"]) == (cost, "EUR")
    assert table.headers["content-type"].startswith("text/csv")
    read = list(csv.DictReader(io.StringIO(table.text)))
    assert [{name: str(value) for name, value in row.items()} for row in (acme, other)] == read
    assert [line.values() for line in lines] == [acme, other]
    for line in (
        'headrace_usage_tokens_total{kind="input",tenant="acme"} 66.0',
        'headrace_usage_tokens_total{kind="cached",tenant="acme"} 32.0',
        'headrace_usage_tokens_total{kind="output",tenant="other"} 4.0',
        'headrace_usage_characters_total{kind="input",tenant="acme"} 66.0',
        'headrace_usage_requests_total{tenant="acme"} 2.0',
        "headrace_usage_book_up 1.0",
        "headrace_usage_unwritten 0.0",
    ):
        assert line in metrics


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 200),
        ("?since=2026-01-01&until=2026-01-31", 200),
        ("?since=2026-02-30", 400),
        ("?until=1999-01-01&since=1999-01-02", 400),
        ("?since=0001-01-01", 400),
    ],
)
async def test_days_that_are_none_are_refused(query: str, status: int) -> None:
    async with counting(say("abc")) as (_, client, _):
        assert (await client.get(f"/usage{query}")).status_code == status


async def test_routers_without_a_shared_book_are_added_up() -> None:
    """By the command, which asks them all."""
    async with (
        counting(say("abc"), shared=False) as (one, client, _),
        counting(say("abc"), shared=False) as (other, another, _),
    ):
        await ask(client)
        await ask(another)
        lines = await asyncio.to_thread(fetch, [one.url, other.url], None, None, PublicTlsSettings())
    (line,) = lines
    assert line.sums == Sums(2, 2 * len(PROMPT), 2 * CACHED, 8, 2 * len(PROMPT), 6)
    assert line.cost == 2 * (Decimal("2.5") * (33 - 16) + Decimal("0.25") * 16 + 40) / 1_000_000


async def test_an_answer_over_midnight_counts_on_the_days_it_was_handed_over() -> None:
    clock = ManualClock()
    today = day_of(clock.wall())
    book = LocalUsage(lambda: day_of(clock.wall()))
    ledger = Ledger(clock, book, epoch=1)
    who = Who("", MODEL)
    ledger.add(who, Sums(1, 10, 0, 3, 10, 3))
    clock.advance(86_400.0)
    ledger.add(who, Sums(output_tokens=2))
    assert await ledger.read(today, today + 1) == {
        today: {who: Sums(1, 10, 0, 3, 10, 3)},
        today + 1: {who: Sums(output_tokens=2)},
    }
    assert iso(today) == "2023-11-14"
