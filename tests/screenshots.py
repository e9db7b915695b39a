"""The dashboard's pictures in docs/images, taken anew: `python -m tests.screenshots [--out FOLDER] [--url ROUTER]`.

Of a made-up cluster with something in every part of the page (tests/integration/overviews.py), served by the real front
door; or, with --url, of a running router's admin port that asks for no key. Needs Chromium.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, expect

from router.requests import Request
from tests.fakes.dispatcher import FakeDispatcher, Step, say
from tests.integration.browser import browser, tab
from tests.integration.front_door_server import MODEL, serve
from tests.integration.overviews import fill, full

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "desktop": {"viewport": DESKTOP},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True},
}
STREAMS = 9
OPENED = 3  # the request whose waterfall is shown: of the made-up ones, one that a second worker carried on


@asynccontextmanager
async def made_up() -> AsyncIterator[str]:
    """The address of a front door with all there is to show, while some are being served."""
    let_go = asyncio.Event()

    def held(request: Request) -> list[Step]:
        return [let_go, *say("abc")(request)]

    async with (
        serve(FakeDispatcher(held)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=None) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(STREAMS):
            group.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"}))
        await served.dispatcher.until_active(STREAMS)
        recent = served.front.metrics.recent
        assert recent is not None
        fill(recent)
        served.dispatcher.seen = full()
        yield served.url
        let_go.set()


async def take(folder: Path, url: str | None = None) -> list[Path]:
    """All pictures, whole pages. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(made_up()) if url is None else url
        chrome = await stack.enter_async_context(browser())
        return [await _one(chrome, address, folder / f"dashboard-{kind}.png", KINDS[kind]) for kind in KINDS]


async def _one(chrome: Browser, url: str, file: Path, options: Mapping[str, Any]) -> Path:
    async with tab(chrome, f"{url}/dashboard", **options) as one:
        await expect(one.page.locator("#freshness")).to_have_text("live")
        requests = one.page.locator(".request")
        if await requests.count() > OPENED:
            await requests.nth(OPENED).locator("button").click()
            await expect(requests.nth(OPENED).locator(".detail")).to_be_visible()
        await one.page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
        await one.page.screenshot(path=file, full_page=True, animations="disabled")
    return file


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.screenshots", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--url", help="of a router's admin port, such as http://127.0.0.1:8002")
    options = parser.parse_args()
    for file in asyncio.run(take(options.out, options.url)):
        sys.stdout.write(f"written: {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
