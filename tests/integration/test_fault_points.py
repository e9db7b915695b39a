"""Fault points in a real cluster: what was set happens, is counted under its own reason, and changes no token."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from cluster.core.config import ClusterConfig
from tests.integration.asks import End, GrpcClient, ask_http, random_ask
from tests.integration.scrape import Scrape, scrape
from tests.integration.stack import Stack, config, stack

REQUESTS = 100
TOGETHER = 12
READ_DELAY_S, STEP_DELAY_S = 0.25, 0.1  # bounds of cells that hold what takes so long or less
FAULTS = [
    {"point": "read.corrupt", "probability": 0.05, "seed": 1},
    {"point": "read.fail", "probability": 0.05, "seed": 2},
    {"point": "read.delay", "probability": 0.15, "seed": 3, "seconds": READ_DELAY_S},
    {"point": "step.delay", "probability": 0.05, "seed": 4, "seconds": STEP_DELAY_S},
    {"point": "allocate.fail", "program": "decode-*", "probability": 0.05, "seed": 5},
    {"point": "session.break", "program": "decode-0", "nth": 60},
    {"point": "link.break", "program": "prefill-0", "probability": 0.05, "seed": 6},
    {"point": "watch.drop", "program": "decode-0", "nth": 4},
    {"point": "offer.kill", "program": "prefill-1", "nth": 20},
    {"point": "step.freeze", "program": "decode-1", "nth": 50, "seconds": 1.6},
    {"point": "engine.kill", "program": "decode-1", "nth": 300},
]


async def load(running: Stack) -> Counter[End]:
    rng = random.Random("fault points")
    waiting = iter([random_ask(rng) for _ in range(REQUESTS)])
    ends: Counter[End] = Counter()
    async with GrpcClient(running) as client, asyncio.TaskGroup() as group:

        async def work() -> None:
            for ask in waiting:
                outcome = await (ask_http(running, ask) if ask.api == "http" else client.ask(ask))
                assert outcome.end is End.OK, (ask, outcome)
                ends[outcome.end] += 1

        for _ in range(TOGETHER):
            group.create_task(work())
    return ends


async def replaced_under_load(running: Stack) -> set[str]:
    """The programs that the load's faults ended, all of whose answers are right."""
    pids = running.pids()
    async with asyncio.timeout(120):
        ends = await load(running)
    assert ends == {End.OK: REQUESTS}
    await running.all_ready()
    await running.quiet()
    now = running.pids()
    assert now.keys() == pids.keys()
    return {name for name in now if now[name] != pids[name]}


async def check(running: Stack) -> None:
    assert await replaced_under_load(running) == {"prefill-1", "decode-1"}, "offer.kill and engine.kill, nobody else"
    counters = await running.counters()
    for what in ("digest_mismatch", "read_failed", "waited_for_room", "attempts_resumed"):
        assert counters.get(what), f"{what}: {counters}"
    assert "-9" in running.cluster.log("decode-1"), "the server says how its engine ended"
    assert "did not run" in running.cluster.log("decode-1"), "step.freeze"
    seen = await scrape(running)
    kept = {"prefill": "prefill-0", "decode": "decode-0"}  # neither has died, so what it counted is all there
    assert seen.sum("headrace_pair_jobs_total", outcome="link lost", **kept), "link.break"
    assert longer(seen, "headrace_handoff_seconds", READ_DELAY_S, part="wire"), "read.delay"
    assert longer(seen, "headrace_worker_step_seconds", STEP_DELAY_S, worker="decode-0"), "step.delay"
    address = running.cluster.ready("decode-0").address
    ended = [line for line in running.cluster.log("router-0").splitlines() if f"stream to {address} ended" in line]
    assert any("the watcher did not read" in line for line in ended), "watch.drop; ready again, it has a watch again"


def longer(seen: Scrape, name: str, seconds: float, **labels: str) -> float:
    """How often it took longer than this, which is a bound of its cells."""
    return seen.sum(f"{name}_count", **labels) - seen.sum(f"{name}_bucket", le=str(seconds), **labels)


@pytest.mark.verify
def test_everything_goes_wrong_at_once_and_no_token_is(tmp_path: Path) -> None:
    settings = ClusterConfig.model_validate({**config().model_dump(), "faults": FAULTS})
    with stack(settings, tmp_path) as running:
        asyncio.run(check(running))


KILLS = [
    {"point": "first.kill", "program": "prefill-1", "nth": 10},
    {"point": "first.kill", "program": "decode-1", "nth": 10},
]


async def check_kills(running: Stack) -> None:
    assert await replaced_under_load(running) == {"prefill-1", "decode-1"}
    assert (await running.counters())["attempts_failed"]


@pytest.mark.verify
def test_workers_die_with_a_first_token_in_their_hands(tmp_path: Path) -> None:
    """One before it leaves, one when it has arrived."""
    settings = ClusterConfig.model_validate({**config().model_dump(), "faults": KILLS})
    with stack(settings, tmp_path) as running:
        asyncio.run(check_kills(running))
