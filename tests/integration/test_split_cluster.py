"""Random load on the real stack: no wrong token, nothing stuck, nothing leaked, whoever leaves when (FAULTS R13)."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.asks import PATH, Ask, End, GrpcClient, ask_http, random_ask, random_leave
from tests.integration.stack import BLOCK, Stack, config, connect, post_bytes, stack

TOGETHER = 24  # requests in flight: more than the pools hold, so that some wait and some are pre-empted


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(config(), tmp_path_factory.mktemp("split")) as cluster:
        yield cluster


async def load(running: Stack, requests: int, seed: str, *, leaving: float) -> Counter[End]:
    """Send `requests` random requests, TOGETHER at a time. Returns how they ended; every answer has been judged."""
    rng = random.Random(seed)
    plan = [(random_ask(rng), random_leave(rng) if rng.random() < leaving else None) for _ in range(requests)]
    waiting = iter(plan)
    ends: Counter[End] = Counter()

    async with GrpcClient(running) as client:

        async def work() -> None:
            for ask, leave in waiting:
                outcome = await (ask_http(running, ask, leave) if ask.api == "http" else client.ask(ask, leave))
                assert outcome.end is not End.ERROR, (ask, outcome)
                ends[outcome.end] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(work())
        await running.quiet()
    return ends


async def check_random_load(running: Stack, requests: int, seed: str) -> None:
    pids = running.pids()
    before = await running.counters()
    async with asyncio.timeout(requests * 0.5):
        ends = await load(running, requests, seed, leaving=0.3)
    assert ends[End.OK] > requests / 2
    assert ends[End.LEFT] > requests / 5
    after = await running.counters()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert not grown.get("prefix_hit_corrupt"), grown
    assert not grown.get("digest_mismatch"), grown
    assert not {name for name in grown if name.startswith("outcome_")} - {"outcome_ok", "outcome_cancelled"}, grown
    for what in ("handoffs", "prefill_local", "attempts_cancelled", "attempts_preempted", "prefix_hit_tokens"):
        assert grown.get(what), f"this load never saw {what}: {grown}"
    assert running.pids() == pids


async def test_random_load(running: Stack) -> None:
    await check_random_load(running, 300, "quick")


async def test_several_prompts_are_answered_as_each_alone_and_leave_together(running: Stack) -> None:
    """FAULTS C16."""
    asks = [Ask(tuple(range(start, start + 40)), 12, n=2, temperature=1.0, seed=7) for start in (0, 20, 40)]
    body = {**asks[0].body(), "prompt": [list(ask.prompt) for ask in asks]}
    whole = await running.post(PATH, {**body, "stream": False, "stream_options": None})
    texts = [text for ask in asks for text in ask.texts()]
    assert [(c["index"], c["text"]) for c in whole.json["choices"]] == list(enumerate(texts))
    assert whole.json["usage"]["prompt_tokens"] == 3 * 40
    assert whole.json["usage"]["completion_tokens"] == 3 * 2 * 12
    async with connect(running.url) as connection:
        await connection.send(post_bytes(PATH, json.dumps({**body, "max_tokens": 200}).encode()))
        await connection.receive(1)
    await running.quiet()


async def test_cached_tokens_are_those_nobody_computed(running: Stack) -> None:
    """A prompt that was never seen is not cached, however much of it was transferred (FAULTS C32)."""
    ask = {**Ask(tuple(range(200, 290)), 4).body(), "stream": False, "stream_options": None}
    answers = [await running.post(PATH, ask) for _ in range(3)]  # on two prefill workers: one of them twice
    cached = [answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert int(answers[0].headers["x-headrace-kv-bytes"]) > 0
    assert cached[0] == 0
    assert set(cached[1:]) - {0} == {90 // BLOCK * BLOCK}


@pytest.mark.verify
async def test_two_thousand_random_requests(running: Stack) -> None:
    await check_random_load(running, 2500, "long")


@pytest.mark.verify
def test_random_load_over_tcp(tmp_path: Path) -> None:
    """Where reads need the holder to poll for them."""
    with stack(config(transport={"require": "tcp"}), tmp_path) as cluster:
        asyncio.run(check_random_load(cluster, 800, "tcp"))
