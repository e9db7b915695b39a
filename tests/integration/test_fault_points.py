"""Fault points in a real cluster: what was set happens, is counted under its own reason, and changes no token."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from cluster.core.config import ClusterConfig
from tests.integration.asks import End, GrpcClient, ask_http, random_ask
from tests.integration.stack import Stack, config, stack

REQUESTS = 100
TOGETHER = 12
FAULTS = [
    {"point": "read.corrupt", "probability": 0.05, "seed": 1},
    {"point": "read.fail", "probability": 0.05, "seed": 2},
    {"point": "read.delay", "probability": 0.05, "seed": 3, "seconds": 0.2},
    {"point": "step.delay", "probability": 0.05, "seed": 4, "seconds": 0.1},
    {"point": "allocate.fail", "program": "decode-*", "probability": 0.05, "seed": 5},
    {"point": "session.break", "program": "decode-0", "nth": 60},
    {"point": "link.break", "program": "prefill-0", "nth": 30},
    {"point": "watch.drop", "program": "decode-1", "nth": 4},
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


async def check(running: Stack) -> None:
    pids = running.pids()
    async with asyncio.timeout(120):
        ends = await load(running)
    assert ends == {End.OK: REQUESTS}
    await running.all_ready()
    await running.quiet()
    now = running.pids()
    assert now["prefill-1"] != pids["prefill-1"], "offer.kill"
    assert now["decode-1"] != pids["decode-1"], "engine.kill"
    assert {name: now[name] for name in ("prefill-0", "decode-0", "router-0")} == {
        name: pids[name] for name in ("prefill-0", "decode-0", "router-0")
    }
    counters = await running.counters()
    for what in ("digest_mismatch", "read_failed", "waited_for_room", "attempts_resumed"):
        assert counters.get(what), f"{what}: {counters}"
    assert "-9" in running.cluster.log("decode-1"), "the server says how its engine ended"
    assert "did not run" in running.cluster.log("decode-1"), "step.freeze"


@pytest.mark.verify
def test_everything_goes_wrong_at_once_and_no_token_is(tmp_path: Path) -> None:
    settings = ClusterConfig.model_validate({**config().model_dump(), "faults": FAULTS})
    with stack(settings, tmp_path) as running:
        asyncio.run(check(running))
