"""Metrics of a real cluster add up, after clean requests and after faults (FAULTS O07)."""

import asyncio
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cluster.core.config import ClusterConfig
from tests.integration.asks import EOS, PATH, Ask, End, GrpcClient, Leave, ask_http, random_ask
from tests.integration.scrape import Scrape, assert_adds_up
from tests.integration.stack import BLOCK, Stack, config, post_bytes, stack
from tests.integration.test_fault_points import FAULTS
from tests.otlp_receiver import Receiver, receiving
from tests.promql import answer, sides
from tests.queries import all_queries, selectors, variables

BEGUN = Leave(answer_bytes=1)


async def load(running: Stack, asks: list[Ask], together: int, left: Sequence[Ask] = ()) -> None:
    """Send them; every answer is judged, and none may be an error. Of those in `left` clients leave once they begin."""
    every: list[tuple[Ask, Leave | None]] = [*((ask, None) for ask in asks), *((ask, BEGUN) for ask in left)]
    waiting: Iterator[tuple[Ask, Leave | None]] = iter(random.Random("order").sample(every, len(every)))
    async with GrpcClient(running) as client, asyncio.TaskGroup() as group:

        async def work() -> None:
            for ask, leave in waiting:
                outcome = await (ask_http(running, ask, leave) if ask.api == "http" else client.ask(ask, leave))
                assert outcome.end is (End.OK if leave is None else End.LEFT), (ask, outcome)

        for _ in range(together):
            group.create_task(work())


def mixed(requests: int, seed: str) -> list[Ask]:
    rng = random.Random(seed)
    return [random_ask(rng) for _ in range(requests)]


def unanswered(query: str, seen: Scrape) -> list[str]:
    """Selectors of a query that nothing in the scrape answers to; of what has not gone wrong yet there is a 0."""
    missing = []
    for selector in selectors(query):
        labels = {name: value for name, (op, value) in selector.labels.items() if op == "="}
        found = seen.of(selector.name, **labels)
        if not found or not all(selector.uses <= {*own, "le"} for own, _ in found):
            missing.append(f"{selector}")
    return missing


def without_data(seen: Scrape) -> list[str]:
    """Panels, and sides of alerts' conditions, that have no number in this scrape; lists of Grafana without a value."""
    missing = []
    for where, query in all_queries():
        for number, side in enumerate(sides(query, seen.samples), 1):
            if not any(map(math.isfinite, side.values())):
                missing.append(f"{where}, side {number}: {query}")
    for where, query, label in variables():
        if not {dict(labels).get(label, "") for labels in answer(query, seen.samples)} - {""}:
            missing.append(f"{where}: {query}")
    return missing


async def check_clean(running: Stack, asks: list[Ask]) -> None:
    await load(running, asks, together=1)
    seen = await assert_adds_up(running, asks, once=True)
    assert seen.sum("headrace_cached_tokens_total") > 0
    assert seen.sum("headrace_pair_kv_bytes_total") > 0
    assert seen.sum("headrace_worker_local_prefills_total") > 0
    for name in ("pair_transfer_seconds_total", "handoff_seconds_sum"):
        parts = seen.by("part", f"headrace_{name}")
        assert {part for part, seconds in parts.items() if seconds > 0} >= {"offer_wait", "wire", "verify", "exposed"}
    assert seen.sum("headrace_worker_step_seconds_count") > 0
    assert seen.sum("headrace_workers") == 4
    assert not {where: missing for where, query in all_queries() if (missing := unanswered(query, seen))}
    assert variables()
    assert not without_data(seen)


async def check_leavers(running: Stack, before: list[Ask]) -> None:
    """Others come and go: what they made and took is in the same books."""
    asks, left = mixed(20, "staying"), mixed(20, "leaving")
    await load(running, asks, together=6, left=left)
    await running.quiet()
    await assert_adds_up(running, [*before, *asks], once=False, left=left)


async def check_trace(running: Stack, receiver: Receiver) -> None:
    """One hand-off of two chunks, for a client that traces."""
    prompt = tuple(random.Random("trace").choices(range(EOS), k=7 * BLOCK + 3))
    body = json.dumps({**Ask(prompt, 20).body(), "stream": False, "stream_options": None}).encode()
    await running.call(post_bytes(PATH, body, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01"))
    assert await asyncio.to_thread(receiver.came.wait, 10.0)
    root = receiver.root()
    spans = {span.name: span for span in receiver.below(root)}
    assert set(spans) == {"parse", "queue", "place", "prefill", "transfer", "decode", "text"}
    assert [span.name for span in receiver.below(spans["prefill"])] == ["chunk", "chunk"]
    order = [spans[name].start_time_unix_nano for name in ("parse", "queue", "place", "prefill", "decode", "text")]
    assert order == sorted(order)
    for span in receiver.spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano


def test_clean_requests_add_up_and_one_that_is_traced_is_a_trace(tmp_path: Path) -> None:
    with receiving() as receiver:
        tracing = {"otlp_endpoint": f"127.0.0.1:{receiver.port}", "insecure": True, "sample_share": 0.0}
        settings = config(tracing=tracing).model_copy(update={"log_format": "json"})
        with stack(settings, tmp_path) as running:
            asyncio.run(check_clean(running, asks := mixed(40, "clean")))
            asyncio.run(check_leavers(running, asks))
            asyncio.run(check_trace(running, receiver))
            for program in running.cluster.names:
                lines = running.cluster.log(program).splitlines()
                assert lines
                assert {json.loads(line)["program"] for line in lines} == {program}


async def check_faults(running: Stack) -> None:
    asks, left = mixed(1800, "faults"), mixed(200, "leaving")
    async with asyncio.timeout(900):
        await load(running, asks, together=12, left=left)
    await running.all_ready()
    await running.quiet()
    seen = await assert_adds_up(running, asks, once=False, left=left, within_s=10.0)
    lives = [status for name in running.pids() if (status := running.cluster.status(name)) is not None]
    restarts = sum(status.restarts for status in lives)  # every life meets its offer.kill or engine.kill
    assert seen.sum("headrace_worker_restarts_total") == restarts >= 2
    assert seen.sum("headrace_worker_events_total", event="digest_mismatch") > 0
    ends = {how for how, count in seen.by("outcome", "headrace_pair_jobs_total").items() if count}
    assert ends & {"read failed", "link lost"}, ends


@pytest.mark.verify
def test_two_thousand_requests_with_faults_add_up(tmp_path: Path) -> None:
    settings = ClusterConfig.model_validate({**config().model_dump(), "faults": FAULTS})
    with stack(settings, tmp_path) as running:
        asyncio.run(check_faults(running))
