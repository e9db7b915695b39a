"""What a cluster wants is told beside what is there, and alerts know the difference: by real scrapes."""

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx

from router.front.dashboard.actions import HEADER
from router.front.dashboard.paths import SCALE
from tests.integration.asks import EOS, Ask, End, ask_http
from tests.integration.scrape import Scrape, scrape
from tests.integration.stack import BLOCK, Stack, config, stack, until
from tests.promql import answer
from tests.queries import rules

PATIENCE_S = 30.0
CONDITIONS = {rule["alert"]: rule["expr"] for rule in rules()}


def wanted(seen: Scrape) -> dict[str, float]:
    return seen.by("pool", "headrace_desired_programs")


def holds(alert: str, seen: Scrape) -> bool:
    return bool(answer(CONDITIONS[alert], seen.samples))


async def scale(running: Stack, pool: str, count: int) -> None:
    """As an operator does, and until a router has heard of it."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        headers = {HEADER.decode(): "1"}
        done = await client.post(f"{running.admin_url}{SCALE}", json={"pool": pool, "workers": count}, headers=headers)
        assert done.status_code == 200, done.text

    async def heard() -> bool:
        return wanted(await scrape(running)).get(pool) == count

    assert await until(heard, PATIENCE_S)


async def check(running: Stack) -> None:
    ask = Ask(tuple(random.Random("local").choices(range(EOS), k=7 * BLOCK)), 5)
    assert (await ask_http(running, ask)).end is End.OK

    async def told() -> bool:
        return (await scrape(running)).sum("headrace_worker_local_prefills_total", reason="no prefill worker") == 1

    assert await until(told, PATIENCE_S)
    alone = await scrape(running)
    assert wanted(alone) == {"prefill": 0, "decode": 1, "router": 1}
    assert not holds("HeadraceNoPrefillWorker", alone)
    assert not holds("HeadracePrefillShort", alone), "decode computes every prompt, as it is meant to"
    assert not holds("HeadraceFewerThanDesired", alone)

    await scale(running, "prefill", 1)

    async def complete() -> bool:
        return (await scrape(running)).sum("headrace_workers", pool="prefill", state="ready") == 1

    assert await until(complete, PATIENCE_S)
    both = await scrape(running)
    assert wanted(both) == {"prefill": 1, "decode": 1, "router": 1}
    assert not holds("HeadraceNoPrefillWorker", both)
    assert not holds("HeadraceFewerThanDesired", both)
    assert holds("HeadracePrefillShort", both), "of the prompts until now"

    frozen = running.cluster.ready("prefill-0").pids[0]
    os.kill(frozen, signal.SIGSTOP)
    try:

        async def missed() -> bool:
            return holds("HeadraceNoPrefillWorker", await scrape(running))

        assert await until(missed, PATIENCE_S)
        assert holds("HeadraceFewerThanDesired", await scrape(running))
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_a_cluster_that_wants_no_prefill_worker_raises_no_alert_for_it(tmp_path: Path) -> None:
    with stack(config(prefill=0, decode=1), tmp_path) as running:
        asyncio.run(check(running))
