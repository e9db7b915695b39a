"""The dashboard in a real browser, over a real cluster: what it shows is what happens."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import orjson
import pytest
from playwright.async_api import Page, Route, expect

from cluster.cli.keys import digest_of, new_key
from tests.integration.browser import WITHIN_MS, Tab, browser, chromium, tab
from tests.integration.stack import BLOCK, CLOCK, MODEL, Stack, config, post_bytes, stack
from tests.verify_record import Report

KEY, MODEST = new_key(), new_key()
PROMPT_TOKENS = 6 * BLOCK + 5
START_MS = 6 * WITHIN_MS  # for a worker to start, or to start again
SEEN_S = 3.0  # after an event the page must show it
TRIES = 3
SHARE = 0.05
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    chromium()
    tenants = {"root": {"keys": [digest_of(KEY)], "operator": True}, "acme": {"keys": [digest_of(MODEST)]}}
    settings = config(prefill=1, decode=2, step_s=0.02, tenants=tenants, timing={"drain_s": 1.0})
    with stack(settings, tmp_path_factory.mktemp("dashboard"), KEY) as cluster:
        yield cluster


async def unlock(page: Page, key: str = KEY) -> None:
    await page.get_by_label("Key").fill(key)
    await page.keyboard.press("Enter")


async def opened(one: Tab) -> Page:
    """The page, with its key, showing something."""
    await unlock(one.page)
    await expect(one.page.locator("main")).to_be_visible()
    one.errors.clear()  # Chromium itself tells of the 401 that asked for the key
    return one.page


async def ask(running: Stack, name: str, tokens: int) -> float:
    """Milliseconds that a client waits for a whole streamed answer, from before it connects to the last byte.

    Each name is another prompt, so that no cache makes a hand-off unnecessary.
    """
    prompt = random.Random(name).choices(range(3, 200), k=PROMPT_TOKENS)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    raw = post_bytes("/v1/completions", orjson.dumps(body), **running.headers, **{"x-request-id": name})
    began = CLOCK.now()
    answer = await running.call(raw, within_s=60.0)
    took = (CLOCK.now() - began) * 1000
    assert answer.status == 200
    assert answer.events()[-1] == "[DONE]"
    return took


async def test_it_asks_for_an_operators_key_and_keeps_it_in_the_tab_alone(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = one.page
        await expect(page.get_by_label("Key")).to_be_focused()
        await unlock(page, "hr-nonsense")
        await expect(page.get_by_text("This key is not known here.")).to_be_visible()
        await unlock(page, MODEST)
        await expect(page.get_by_text("This key is no operator")).to_be_visible()
        await expect(page.locator("main")).to_be_hidden()
        await unlock(page)
        await expect(page.locator('.worker[data-key="decode-1"] .state')).to_have_text("ready")
        kept = await page.evaluate("() => [Object.values(sessionStorage), Object.keys(localStorage), document.cookie]")
        assert kept == [[KEY], [], ""]
        await page.get_by_role("button", name="Forget key").click()
        await expect(page.locator("main")).to_be_hidden()
        assert await page.evaluate("() => sessionStorage.length") == 0
        assert await one.stopped() == []
        assert all("40" in error for error in one.errors), one.errors  # the 401s and 403s, told by Chromium itself


async def test_an_answer_that_comes_after_its_key_was_forgotten_is_not_shown(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def hold(route: Route) -> None:
            answer = await route.fetch()
            asked.set()
            await may_answer.wait()
            await route.fulfill(response=answer)

        await page.route("**/dashboard/data", hold)
        await asked.wait()
        await page.get_by_role("button", name="Forget key").click()
        async with page.expect_response("**/dashboard/data") as heard:
            may_answer.set()
        assert (await (await heard.value).json())["pools"]
        await page.evaluate("() => fetch('/dashboard/app.js').then((script) => script.text())")
        await page.set_viewport_size({"width": 700, "height": 700})
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        await expect(page.locator("main")).to_be_hidden()
        await expect(page.get_by_label("Key")).to_be_visible()
        await one.assert_clean()


async def test_a_request_shows_its_kv_and_a_waterfall_that_adds_up_to_what_its_client_measured(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        missed = []
        for attempt in range(TRIES):  # a machine that is busy elsewhere makes clients late, and only late
            measured = await ask(running, name := f"measured-{attempt}", 60)
            line = page.get_by_role("button", name=name)
            await line.focus()
            await page.keyboard.press("Enter")
            rows = page.locator(".request", has=line).locator(".waterfall li")
            await expect(page.locator(".request", has=line)).to_have_attribute("data-tone", "good")
            parts = {
                await row.get_attribute("data-part"): float(await row.get_attribute("data-ms") or 0)
                for row in await rows.all()
            }
            total = parts.pop("total")
            assert sum(parts.values()) == pytest.approx(total, rel=0.001)
            assert {"receive", "admit", "prefill", "decode", "delivery"} <= set(parts)
            if abs(total - measured) <= SHARE * measured:
                break
            missed.append((measured, parts))
        else:
            pytest.fail(f"off by more than {SHARE:.0%}, each time: {missed}")
        moved = page.locator("#handoffs tr").first
        await expect(moved.locator("th")).to_contain_text("prefill-0")
        await expect(moved.locator("td").nth(2)).to_contain_text("kB")
        assert await page.locator("#flow .ribbon").count() >= 1
        await one.assert_clean()


async def test_a_hand_off_under_way_is_seen_between_its_pair(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        going = asyncio.Event()

        async def clients(number: int) -> None:
            turn = 0
            while not going.is_set():
                turn += 1
                await ask(running, f"client-{number}-{turn}", 2)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(clients(number))
            try:
                await expect(page.locator("tr[data-under-way] th").first).to_contain_text("prefill-0")
                await page.wait_for_selector("#flow .current", state="attached")
            finally:
                going.set()
        await one.assert_clean()


async def test_its_policy_stops_what_is_not_its_own(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        await page.evaluate(
            """() => {
                const script = document.createElement("script");
                try { script.textContent = "window.hacked = 1"; document.body.append(script); } catch { }
                try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='hacked = 2'>"); } catch { }
                const style = document.createElement("style");
                style.textContent = "body { display: none }";
                document.body.append(style);
            }"""
        )
        told = await page.evaluate(f"() => fetch('{running.url}/live').then(() => 'told', () => 'stopped')")
        assert told == "stopped"
        assert await page.evaluate("() => window.hacked") is None
        await expect(page.locator("body")).to_be_visible()
        assert {"connect-src", "style-src-elem"} <= set(await one.stopped())


async def test_it_fits_a_phone_in_the_dark(running: Stack) -> None:
    options = {"viewport": PHONE, "color_scheme": "dark", "is_mobile": True, "has_touch": True}
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard", **options) as one:
        page = await opened(one)
        await ask(running, "x" * 128, 4)
        await page.get_by_role("button", name="x" * 128).tap()
        await expect(page.locator(".detail").first).to_be_visible()
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
        dark, light = await page.evaluate(
            "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            ".map((one) => Number(one.match(/\\d+/)[0]))"
        )
        assert dark < 40 < 200 < light
        await one.assert_clean()


@pytest.mark.verify
async def test_operators_scale_and_drain_from_it_with_the_keyboard_alone(running: Stack) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        await page.get_by_role("button", name="Scale the prefill pool").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name="Scale the prefill pool")).to_be_visible()
        await page.get_by_label("Workers").fill("2")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await expect(page.locator('.worker[data-key="prefill-1"] .state')).to_have_text("ready", timeout=START_MS)
        drained = page.locator('.worker[data-key="prefill-1"]')
        await page.get_by_role("button", name="Drain prefill-1").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await page.get_by_role("button", name="Drain prefill-1").click()
        await page.get_by_role("button", name="Drain", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(drained.locator(".about")).to_contain_text("1 restart", timeout=START_MS)
        await one.assert_clean()
    await asyncio.to_thread(running.cluster.wait_ready)


@pytest.mark.verify
async def test_the_death_of_a_decode_worker_is_seen_and_its_return(running: Stack, report: Report) -> None:
    async with browser() as chrome, tab(chrome, f"{running.admin_url}/dashboard") as one:
        page = await opened(one)
        state = page.locator('.worker[data-key="decode-0"]')
        before = running.cluster.ready("decode-0")
        os.kill(before.pids[0], signal.SIGKILL)
        died = CLOCK.now()
        await expect(state).to_have_attribute("data-tone", "bad")
        seen_s = CLOCK.now() - died

        def back() -> bool:
            status = running.cluster.status("decode-0")
            return status is not None and status.ready is not None and status.ready.epoch != before.epoch

        assert await asyncio.to_thread(running.cluster.wait, back, 60.0)
        returned = CLOCK.now()
        await expect(state.locator(".state")).to_have_text("ready")
        back_s = CLOCK.now() - returned
        await expect(state.locator(".about")).to_contain_text("1 restart, back after")
        report(f"dashboard: a decode worker's death is seen after {seen_s:.2f} s, its return after {back_s:.2f} s")
        assert seen_s <= SEEN_S
        assert back_s <= SEEN_S
        await one.assert_clean()
