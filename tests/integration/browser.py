"""A real browser, headless: the machine's Chromium, driven by Playwright over its debugging protocol.

Playwright's own browsers are not used: nothing is downloaded. What the page logs as an error, what it throws and what
its Content-Security-Policy stops is collected, and every test ends by asking for it.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from tests.verify_record import Missing

WITHIN_MS = 20_000.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    """Where the machine's browser is. Raises Missing where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise Missing("no Chromium on this machine (Debian, Ubuntu: apt install chromium)")
    return found


@dataclass(slots=True)
class Tab:
    """One page, and what went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def stopped(self) -> list[str]:
        """What the page's policy did not allow."""
        found: list[str] = await self.page.evaluate("() => window.stopped")
        return found

    async def assert_clean(self) -> None:
        assert self.errors == []
        assert await self.stopped() == []


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """One for all tabs of a test."""
    program = chromium()
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def tab(running: Browser, url: str, **options: Any) -> AsyncIterator[Tab]:
    """A tab of its own on `url`, with a profile of its own. `options`: Playwright's, such as `color_scheme`."""
    context = await running.new_context(**options)
    context.set_default_timeout(WITHIN_MS)
    page = await context.new_page()
    made = Tab(page)

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            made.errors.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: made.errors.append(str(error)))
    await page.add_init_script(
        "window.stopped = []; document.addEventListener('securitypolicyviolation',"
        " (event) => window.stopped.push(event.violatedDirective));"
    )
    try:
        await page.goto(url)
        yield made
    finally:
        await context.close()
