"""Five thousand clients at once on the real stack: bounded memory, honest refusals, nothing restarts (FAULTS P09)."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.stack import CLOCK, MODEL, HttpAnswer, Stack, config, connect, post_bytes, stack

CLIENTS = 5000
QUEUE = 64
AT_ONCE = 500  # that are connecting
BODY = {"model": MODEL, "prompt": "a river " * 8, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = config(router={"queue_limit": QUEUE, "deadline_s": 60.0}, step_s=0.01)
    with stack(settings, tmp_path_factory.mktemp("flood")) as cluster:
        yield cluster


async def ttft(running: Stack) -> float:
    began = CLOCK.now()
    answer = await running.post("/v1/completions", {**BODY, "max_tokens": 1})
    assert answer.status == 200, answer
    return CLOCK.now() - began


@pytest.mark.verify
async def test_five_thousand_clients_at_once(running: Stack) -> None:
    before = [await ttft(running) for _ in range(10)]
    pids = running.pids()
    router = psutil.Process(pids["router-0"][0])
    rss = router.memory_info().rss
    connecting = asyncio.Semaphore(AT_ONCE)
    answers: list[HttpAnswer] = []
    greatest = rss

    async def client() -> None:
        nonlocal greatest
        async with connecting:
            line = connect(running.url)
            connection = await line.__aenter__()
        try:
            await connection.send(post_bytes("/v1/completions", json.dumps(BODY).encode()))
            answers.append(await connection.answer())
            greatest = max(greatest, router.memory_info().rss)
        finally:
            await line.__aexit__(None, None, None)

    async with asyncio.timeout(240):
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) == {200, 429}, statuses
    assert statuses[200] >= QUEUE
    assert all(answer.whole for answer in answers)
    refused = [answer for answer in answers if answer.status == 429]
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert greatest - rss < 300e6, f"{(greatest - rss) / 1e6:.0f} MB more"
    assert running.pids() == pids
    await running.quiet(10.0)
    after = [await ttft(running) for _ in range(10)]
    assert sorted(after)[5] <= 3 * sorted(before)[5] + 0.1, "ten seconds later it is as quick as before"
