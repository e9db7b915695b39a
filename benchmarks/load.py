"""Drives the two kinds of load: open loop by arrival times, closed loop by concurrency."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.timeline import Timeline
from benchmarks.workloads import Ask
from cluster.core.clock import Clock


class Streams(Protocol):
    """What is asked: a server over HTTP, or anything else that answers."""

    async def stream(self, ask: Ask) -> Timeline:
        """One answer of exactly `max_tokens` tokens, greedy. Never raises for what the other side does."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load. `lags`: how late each request of an open loop was sent, in seconds."""

    timelines: list[Timeline]
    lags: list[float]


async def open_loop(client: Streams, asks: Sequence[Ask], clock: Clock) -> Load:
    """Send each request at its time; return when all have ended."""
    start = clock.now()
    lags: list[float] = []
    running: list[asyncio.Task[Timeline]] = []
    for ask in asks:
        if (wait := start + ask.at - clock.now()) > 0:
            await asyncio.sleep(wait)
        lags.append(max(0.0, clock.now() - start - ask.at))
        running.append(asyncio.create_task(client.stream(ask)))
    return Load(list(await asyncio.gather(*running)), lags)


async def closed_loop(client: Streams, asks: Sequence[Ask], concurrency: int) -> Load:
    """Keep `concurrency` requests running until all have ended."""
    waiting = iter(asks)
    timelines: list[Timeline] = []

    async def worker() -> None:
        for ask in waiting:
            timelines.append(await client.stream(ask))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return Load(timelines, [])
