"""The dashboard's page in a real browser, over a router that says what a test wants: rare moments, hostile names."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from playwright.async_api import Page, Route, expect

from router.overview import Overview
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.browser import Tab, browser, tab
from tests.integration.front_door_server import Served, serve
from tests.integration.overviews import overview, request

LOOK = "() => document.dispatchEvent(new Event('visibilitychange'))"  # the page asks at once
HOSTILE = "<img src=x onerror=alert(1)>\u202e'\"`${1}"


@asynccontextmanager
async def page_over(seen: Overview) -> AsyncIterator[tuple[Served, Tab]]:
    async with serve(FakeDispatcher(say("abc"))) as served:
        served.dispatcher.seen = seen
        async with browser() as chrome, tab(chrome, f"{served.url}/dashboard") as one:
            await expect(one.page.locator("main")).to_be_visible()
            yield served, one


async def look(page: Page) -> None:
    """Until the page has asked once more and shown what it was told."""
    async with page.expect_response("**/dashboard/data") as heard:
        await page.evaluate(LOOK)
    await (await heard.value).finished()
    await page.evaluate("() => new Promise(requestAnimationFrame)")


async def test_a_window_that_changes_makes_an_old_picture_no_newer() -> None:
    async with page_over(overview()) as (_, one):
        page = one.page
        await page.clock.install()
        await page.reload()
        await expect(page.locator("#freshness")).to_have_text("live")

        async def away(route: Route) -> None:
            await route.abort()

        await page.route("**/dashboard/data", away)
        await page.clock.fast_forward(10_000)
        await expect(page.locator("body.stale #freshness")).to_contain_text("as of")
        await page.set_viewport_size({"width": 700, "height": 700})
        await page.evaluate("() => dispatchEvent(new Event('resize'))")
        await page.clock.fast_forward(1_000)
        assert "as of" in await page.locator("#freshness").inner_text()
        assert await page.locator("body.stale").count() == 1


async def test_the_answer_to_a_question_that_was_closed_leaves_the_next_one_open() -> None:
    async with page_over(overview()) as (_, one):
        page, asked, may_answer = one.page, asyncio.Event(), asyncio.Event()

        async def hold(route: Route) -> None:
            asked.set()
            await may_answer.wait()
            await route.fulfill(status=202, json={"done": False})

        await page.route("**/admin/drain", hold)
        await page.get_by_role("button", name="Drain decode-0").click()
        await page.get_by_role("button", name="Drain", exact=True).click()
        await asked.wait()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Scale the prefill pool").click()
        may_answer.set()
        await expect(page.locator("#toast")).to_have_text("decode-0 is draining.")
        await expect(page.get_by_role("dialog", name="Scale the prefill pool")).to_be_visible()
        await expect(page.get_by_role("button", name="Scale", exact=True)).to_be_enabled()
        await one.assert_clean()


async def test_a_request_that_is_read_stays_and_does_not_run_for_ever_when_its_router_forgot_it() -> None:
    async with page_over(overview(request("r1", "theirs", running=True))) as (served, one):
        line = one.page.get_by_role("button", name="theirs")
        await line.click()
        await expect(line.locator(".outcome")).to_have_text("running")
        served.dispatcher.seen = overview()
        await look(one.page)
        await expect(line.locator(".outcome")).to_contain_text("not told of any more")
        await expect(one.page.locator(".request .detail")).to_be_visible()
        await one.assert_clean()


async def test_a_request_is_as_old_as_its_end_once_it_has_ended() -> None:
    record = request("r1", "long")
    assert record.ended_ms is not None
    hour_s = 3600.0
    record.trace.arrived, record.arrived = (record.trace.arrived or 0.0) - hour_s, record.arrived - hour_s
    record.ended_ms += hour_s * 1000
    async with page_over(overview(record)) as (_, one):
        await expect(one.page.locator(".request .total")).to_have_text("3601 s")
        await expect(one.page.locator(".request .outcome")).to_have_text(re.compile(r"ok, (just now|\d+ s ago)"))
        await one.assert_clean()


async def test_left_open_it_holds_no_more_than_it_shows() -> None:
    async with page_over(overview()) as (served, one):
        counts = []
        for turn in range(30):
            served.dispatcher.seen = overview(*(request(f"r{turn}-{i}", f"id-{turn}-{i}") for i in range(40)))
            await look(one.page)
            counts.append(await one.page.evaluate("() => document.querySelectorAll('*').length"))
        assert counts[-1] == counts[5]
        await one.assert_clean()


async def test_names_that_somebody_chose_are_text() -> None:
    hostile = overview(request("r1", HOSTILE), name=HOSTILE)
    hostile = replace(hostile, workers=[replace(each, state=f"mismatch: {HOSTILE}") for each in hostile.workers])
    async with page_over(hostile) as (_, one):
        page = one.page
        await page.locator(".request button").first.click()
        await expect(page.locator(".request .id").first).to_have_text(HOSTILE)
        await expect(page.locator("#handoffs th").first).to_contain_text(HOSTILE)
        assert await page.locator("main img").count() == 0
        await one.assert_clean()


async def test_an_answer_that_cannot_be_drawn_is_said_and_does_not_look_live() -> None:
    async with page_over(overview()) as (_, one):
        page, missing = one.page, ["flows"]

        async def maim(route: Route) -> None:
            answer = await route.fetch()
            await route.fulfill(
                json={name: value for name, value in (await answer.json()).items() if name not in missing}
            )

        await expect(page.locator("#freshness")).to_have_text("live")
        await page.route("**/dashboard/data", maim)
        await expect(page.locator("#health")).to_contain_text("cannot draw")
        await expect(page.locator("body.stale #freshness")).to_have_text("cannot be drawn")
        assert any("flows" in error for error in one.errors), one.errors
        missing.clear()
        await expect(page.locator("#freshness")).to_have_text("live")
        await expect(page.locator("#health")).to_have_text("serving")
        assert await page.locator("body.stale").count() == 0
