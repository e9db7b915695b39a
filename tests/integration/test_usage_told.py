"""Who is told which usage, of which days, and by whom: GET /usage, /metrics and `headrace usage`."""

import asyncio
import csv
import io
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.usage import fetch
from cluster.config import API_KEY_VARIABLE
from cluster.core.access import PublicTlsSettings
from cluster.core.config import UsageSettings
from cluster.core.errors import HeadraceError
from cluster.usage import Sums
from tests.fakes.dispatcher import say
from tests.integration.counting import CACHED, KEYS, PATH, PROMPT, ask, bearer, counting
from tests.integration.front_door_server import MODEL


async def test_every_tenant_begins_at_nothing_so_that_its_first_interval_is_a_change() -> None:
    async with counting(say("abc"), tenants=True) as (served, client, _):
        await client.post(PATH, json={"model": MODEL, "prompt": PROMPT}, headers=bearer("acme"))
        value = served.front.metrics.registry.get_sample_value
        for tenant, count in (("acme", 1), ("other", 0), ("root", 0)):
            assert value("headrace_usage_requests_total", {"tenant": tenant}) == count
            for kind in ("input", "cached", "output"):
                tokens = value("headrace_usage_tokens_total", {"tenant": tenant, "kind": kind})
                assert (tokens is not None, bool(tokens)) == (True, bool(count))
            for kind in ("input", "output"):
                characters = value("headrace_usage_characters_total", {"tenant": tenant, "kind": kind})
                assert (characters is not None, bool(characters)) == (True, bool(count))
            cost = value("headrace_usage_cost", {"tenant": tenant, "currency": "EUR"})
            assert (cost is not None, bool(cost)) == (True, bool(count))
        assert value("headrace_usage_requests_total", {"tenant": ""}) is None
    async with counting(say("abc")) as (served, _, _):
        assert served.front.metrics.registry.get_sample_value("headrace_usage_requests_total", {"tenant": ""}) == 0


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
        written = await asyncio.to_thread(CliRunner().invoke, app, ["usage", "--address", served.url])
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
    assert written.exit_code == 0
    assert written.stdout.splitlines() == table.text.splitlines(), "the command writes what the router does"
    for line in (
        'headrace_usage_tokens_total{kind="input",tenant="acme"} 66.0',
        'headrace_usage_tokens_total{kind="cached",tenant="acme"} 32.0',
        'headrace_usage_tokens_total{kind="output",tenant="other"} 4.0',
        'headrace_usage_characters_total{kind="input",tenant="acme"} 66.0',
        'headrace_usage_characters_total{kind="output",tenant="acme"} 6.0',
        'headrace_usage_characters_total{kind="output",tenant="other"} 3.0',
        'headrace_usage_requests_total{tenant="acme"} 2.0',
        f'headrace_usage_cost{{currency="EUR",tenant="acme"}} {float(cost)}',
        'headrace_usage_cost{currency="EUR",tenant="root"} 0.0',
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
        ("?until=0001-01-05", 400),
        ("?since=0001-01-01&until=0001-01-05", 200),
        ("?until=9999-12-31", 200),
        ("?since=9999-12-30&until=9999-12-31", 400),
    ],
)
async def test_days_that_are_none_are_refused(query: str, status: int) -> None:
    async with counting(say("abc")) as (_, client, _):
        assert (await client.get(f"/usage{query}")).status_code == status


async def test_no_question_reads_more_days_than_are_kept() -> None:
    async with counting(say("abc")) as (_, client, book):
        for since in ("", "?since=2017-01-01&until=9999-12-31", "?since=2020-01-01"):
            assert (await client.get(f"/usage{since}")).status_code == 200
    assert [until - since < UsageSettings().keep_days + 2 for since, until in book.read_days] == [True] * 3


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


async def test_one_router_that_is_gone_hides_no_shared_book() -> None:
    gone = "http://127.0.0.1:1"
    async with counting(say("abc")) as (served, client, book):
        await ask(client)
        (line,) = await asyncio.to_thread(fetch, [gone, served.url], None, None, PublicTlsSettings())
        assert line.sums.requests == 1
        book.away = True
        with pytest.raises(HeadraceError, match=f"^{served.url} answers with 503; {gone} does not answer"):
            await asyncio.to_thread(fetch, [served.url, gone], None, None, PublicTlsSettings())


async def test_what_a_router_counts_for_itself_is_missed_by_name() -> None:
    """A sum without it would look like all of it."""
    gone = "http://127.0.0.1:1"
    async with counting(say("abc"), shared=False) as (served, client, _):
        await ask(client)
        for routers in ([gone, served.url], [served.url, gone]):
            with pytest.raises(HeadraceError, match=f"^{gone} does not answer"):
                await asyncio.to_thread(fetch, routers, None, None, PublicTlsSettings())
