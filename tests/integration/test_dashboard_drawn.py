"""What the dashboard draws of a full answer: figures, charts, failovers, requests; its buttons; and a walk by keyboard.

Numbers are compared with the answer that the page was told, and that with what was put in.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Locator, Page, expect

from cluster.pipe import Drain, Scale
from router.front.auth import Gate
from router.front.dashboard.paths import DATA
from router.overview import RECENT
from router.requests import Request
from tests import screenshots
from tests.fakes.dispatcher import FakeDispatcher, Step, say
from tests.integration import overviews
from tests.integration.browser import Tab, browser, tab
from tests.integration.front_door_server import MODEL, Served, serve
from tests.integration.overviews import fill, full
from tests.integration.test_api_keys import ROOT, gate

FEW = 12  # requests that are shown at first
SHARES = ("p50", "p95", "p99")
STREAMS = 2
MOST_TABS = 40
FOCUSED = "() => document.activeElement.textContent || document.activeElement.id"


@asynccontextmanager
async def drawn(keys: Gate | None = None, fake: FakeDispatcher | None = None) -> AsyncIterator[tuple[Served, Tab]]:
    async with serve(fake or FakeDispatcher(say("abc")), gate=keys) as served:
        recent = served.front.metrics.recent
        assert recent is not None
        served.dispatcher.seen = full()
        fill(recent)
        async with browser() as chrome, tab(chrome, f"{served.url}/dashboard") as one:
            if keys is None:
                await expect(one.page.locator("main")).to_be_visible()
            yield served, one
            if keys is None:
                await one.assert_clean()


def figure(page: Page, name: str) -> Locator:
    return page.locator(f'#figures [data-key="{name}"] dd')


def in_words(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"


async def test_figures_are_those_of_the_answer() -> None:
    let_go = asyncio.Event()

    def held(request: Request) -> list[Step]:
        return [let_go, *say("abc")(request)]

    async with (
        drawn(fake=FakeDispatcher(held)) as (served, one),
        httpx.AsyncClient(base_url=served.url, timeout=None) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(STREAMS):
            group.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"}))
        await served.dispatcher.until_active(STREAMS)
        told = (await client.get(DATA)).json()["recent"]
        assert 180 < told["ttft"]["p50"] < 300 < told["ttft"]["p95"] * 1.25
        assert 20 < told["itl"]["p50"] < told["itl"]["p95"] < 55
        page = one.page
        await expect(figure(page, "Streams")).to_have_text([str(STREAMS), "being served"])
        await expect(figure(page, "Waiting")).to_have_text([str(overviews.WAITING), "of 512 at most"])
        for name, times in (("First token", told["ttft"]), ("Between tokens", told["itl"])):
            await expect(figure(page, name)).to_have_text([in_words(times["p50"]), f"95th {in_words(times['p95'])}"])
        await expect(figure(page, "Cached")).to_have_text(["23 %", "of prompt tokens"])
        await expect(figure(page, "Ended")).to_have_text([str(overviews.ENDED), f"{overviews.BAD} badly"])
        let_go.set()


@pytest.mark.parametrize(("chart", "name"), [("ttft", "Time to first token"), ("itl", "Time between tokens")])
async def test_charts_have_a_gap_where_nothing_came_and_their_peak_where_it_was(chart: str, name: str) -> None:
    async with drawn() as (served, one):
        async with httpx.AsyncClient(base_url=served.url) as client:
            told = (await client.get(DATA)).json()["recent"][chart]
        said = f"median {in_words(told['p50'])}, 95th {in_words(told['p95'])}"
        await expect(one.page.locator(f"#{chart}-now")).to_have_text(said)
        svg = one.page.locator(f"#{chart}")
        await expect(svg).to_have_attribute("aria-label", f"{name}, last five minutes: {_aria(told)}")
        lines = [await _points(line) for line in await svg.locator("polyline.p50").all()]
        assert len(lines) == 2, "before the quiet half minute, and after it"
        slots = sum(value is not None for value in told["series"]["p50"])
        assert sum(map(len, lines)) == slots
        width = float(str(await svg.get_attribute("viewBox")).split()[2])
        assert lines[1][-1][0] == pytest.approx(width, abs=2 * width / len(told["series"]["p50"]))
        if chart == "ttft":
            peak = min((point for line in lines for point in line), key=lambda point: point[1])
            ago = (1 - peak[0] / width) * overviews.MINUTES * 60
            assert ago == pytest.approx(overviews.SPIKE_S, abs=10)


def _aria(told: dict[str, float]) -> str:
    p50, p95, p99 = (
        in_words(told[share]) if told[share] < 999.5 else f"{told[share] / 1000:.2f} s" for share in SHARES
    )
    return f"median {p50}, 95th percentile {p95}, 99th {p99}"


async def _points(line: Locator) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in str(await line.get_attribute("points")).split()]
    return [(float(x), float(y)) for x, y in pairs]


async def test_workers_flows_and_failovers_are_all_there() -> None:
    async with drawn() as (served, one):
        page, seen = one.page, served.dispatcher.seen
        await expect(page.locator('.pool[data-role="decode"] [data-part="summary"]')).to_have_text("2 of 3 ready")
        await expect(page.locator(".pool .worker h4")).to_have_text(
            ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
        )
        gone = page.locator('.worker[data-key="decode-1"]')
        await expect(gone).to_have_attribute("data-tone", "bad")
        await expect(gone.locator(".state")).to_contain_text("gone")
        await expect(page.locator('.worker[data-key="decode-2"] .about')).to_contain_text("1 restart, back after 2.5 s")
        await expect(page.locator("#handoffs tr")).to_have_count(len(seen.flows))
        await expect(page.locator("#handoffs tr").first).to_contain_text("2 (520 tok)")
        await expect(page.locator("#flow .ribbon")).to_have_count(len(seen.flows))
        await expect(page.locator("#flow .current")).to_have_count(sum(flow.under_way > 0 for flow in seen.flows))
        rows = page.locator("#failovers li")
        await expect(rows).to_have_count(len(seen.failovers))
        failover = seen.failovers[0]
        assert failover.successor is not None
        route = f"{failover.failed.decode} → {failover.successor.decode}"
        await expect(rows.first.locator("span")).to_have_text(
            ["5 s ago", route, failover.record.public_id, failover.failed.outcome]
        )
        await expect(page.locator("#no-failovers")).to_be_hidden()


async def test_all_requests_are_shown_when_asked_for_and_few_again() -> None:
    async with drawn() as (served, one):
        page, names = one.page, [record.public_id for record in served.dispatcher.seen.requests]
        shown, more = page.locator("#requests .id"), page.locator("#more")
        await expect(shown).to_have_text(names[:FEW])
        await expect(more).to_have_text(f"Show {RECENT}")
        await expect(more).to_have_attribute("aria-expanded", "false")
        await more.click()
        await expect(shown).to_have_text(names)
        await expect(more).to_have_attribute("aria-expanded", "true")
        await expect(more).to_have_text(f"Show {FEW}")
        await more.click()
        await expect(shown).to_have_text(names[:FEW])


async def test_paused_it_asks_nothing_and_goes_on_where_things_are() -> None:
    async with drawn() as (served, one):
        page, asked = one.page, []
        await page.clock.install()
        await page.reload()
        await expect(page.locator("#freshness")).to_have_text("live")
        pause = page.locator("#pause")
        await pause.click()
        await expect(page.locator("#freshness")).to_have_text("paused")
        await expect(pause).to_have_attribute("aria-pressed", "true")
        page.on("request", lambda request: asked.append(request.url))
        served.dispatcher.seen = overviews.overview()
        await page.clock.run_for(10_000)
        assert asked == []
        await expect(page.locator("#freshness")).to_have_text("paused")
        await expect(page.locator("#failovers li").first).to_be_visible()
        await pause.click()
        await expect(page.locator("#no-failovers")).to_be_visible()
        await expect(page.locator("#freshness")).to_have_text("live")
        await expect(pause).to_have_attribute("aria-pressed", "false")


async def tab_to(page: Page, name: str) -> list[str]:
    """Press Tab until `name` has the focus, and can be seen to have it. Returns the way there."""
    way: list[str] = []
    while len(way) < MOST_TABS:
        await page.keyboard.press("Tab")
        way.append(" ".join(str(await page.evaluate(FOCUSED)).split()))
        if way[-1] == name:
            focused = page.locator(":focus-visible")
            await expect(focused).to_have_css("outline-style", "solid")
            return way
    pytest.fail(f"Tab never comes to {name}: {way}")


async def test_an_operator_gets_from_the_key_to_each_action_with_nothing_but_a_keyboard() -> None:
    async with drawn(gate()) as (served, one):
        page, keys, wishes = one.page, one.page.keyboard, served.dispatcher.wishes
        await expect(page.get_by_label("Key")).to_be_focused()
        await keys.type(ROOT)
        await keys.press("Enter")
        await expect(page.locator("main")).to_be_visible()
        way = await tab_to(page, "Drain decode-0")
        assert way == ["Scale the prefill pool", "Drain prefill-0", "Scale the decode pool", "Drain decode-0"]
        await keys.press("Enter")
        await expect(page.get_by_role("dialog", name="Drain decode-0?")).to_be_visible()
        await keys.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await expect(page.get_by_role("button", name="Drain decode-0")).to_be_focused()
        assert wishes == []
        await keys.press("Enter")
        await tab_to(page, "Drain")
        await keys.press("Enter")
        await expect(page.locator("#toast")).to_have_text("decode-0 is draining.")
        assert wishes == [Drain("decode-0")]
        await expect(page.get_by_role("button", name="Drain decode-0")).to_be_focused()
        await keys.press("Shift+Tab")
        await keys.press("Enter")
        await expect(page.get_by_role("dialog", name="Scale the decode pool")).to_be_visible()
        await expect(page.get_by_label("Workers")).to_be_focused()
        await keys.press("Control+A")
        await keys.type("5")
        await keys.press("Enter")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        assert wishes == [Drain("decode-0"), Scale("decode", 5)]


async def test_a_request_opens_and_closes_by_keyboard() -> None:
    async with drawn() as (served, one):
        record = served.dispatcher.seen.requests[3]
        for _ in range(MOST_TABS):
            await one.page.keyboard.press("Tab")
            if record.public_id in str(await one.page.evaluate(FOCUSED)):
                break
        line = one.page.locator(".request", has_text=record.public_id)
        await one.page.keyboard.press("Enter")
        await expect(line.locator(".waterfall li[data-part='total']")).to_be_visible()
        lost = line.locator(".waterfall .bar[data-lost]")
        await expect(lost).to_have_count(4)
        await expect(lost.first).to_have_css("background-image", re.compile("repeating-linear-gradient"))
        await one.page.keyboard.press("Enter")
        await expect(line.locator(".detail")).to_be_hidden()


async def test_pictures_of_whole_pages_are_taken(tmp_path: Path) -> None:
    sizes = {file.name: _size(file.read_bytes()) for file in await screenshots.take(tmp_path)}
    assert set(sizes) == {file.name for file in screenshots.IMAGES.glob("dashboard-*.png")}
    assert sizes["dashboard-dark.png"] == sizes["dashboard-desktop.png"]
    width, height = sizes["dashboard-phone.png"]
    assert width == screenshots.PHONE["width"] * 1.5
    assert height > 4 * screenshots.PHONE["height"], "down to the failovers"


def _size(png: bytes) -> tuple[int, int]:
    """A PNG begins with its header: 8 bytes of signature, then length and type, then width and height."""
    assert png.startswith(b"\x89PNG\r\n")
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
