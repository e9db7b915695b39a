"""Clients of a chaos run: each asks one request after the other, at any router, and judges what it gets.

A client behaves as a good one does behind a load balancer: 429, 503 and a refused connection make it try again, here or
at another router, until its deadline. Everything else must be a right answer, unless its router was killed meanwhile.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from chaos.ask import Ask, Manner, random_manner
from chaos.disturb import Disturbances
from chaos.exchange import End, Exchange, over_grpc, over_http
from chaos.reference import Reference
from chaos.routers import Routers
from chaos.settings import DEADLINE_S, ChaosSettings
from chaos.tally import Tally, count_failover, judge
from cluster.core.clock import Clock
from cluster.pipe import Ready

GRACE_S = 5.0  # an answer that is later than deadline and this is counted as hung
_DOOR_S = 2.0  # within which a call that a closing door never took is hung up on
_MAX_PAUSE_S = 1.0
_MAX_WORDS = 20  # of each kind of violation are kept

NextAsk = Callable[[random.Random], Ask]


@dataclass(frozen=True, slots=True)
class Table:
    """What all clients share."""

    settings: ChaosSettings
    model: str
    routers: Routers
    reference: Reference
    next_ask: NextAsk
    disturbances: Disturbances
    clock: Clock
    tally: Tally


async def clients(table: Table, stopping: asyncio.Event) -> None:
    """All clients, until `stopping` and the end of what they had asked."""
    async with asyncio.TaskGroup() as group:
        for number in range(table.settings.clients):
            group.create_task(_client(table, number, stopping))


async def _client(table: Table, number: int, stopping: asyncio.Event) -> None:
    rng = random.Random(f"{table.settings.seed} client {number}")
    while not stopping.is_set():
        ask = table.next_ask(rng)
        manner = random_manner(rng, table.settings.cancels, ask)
        outcome = await _serve(table, rng, ask, manner)
        table.tally.outcomes[outcome] += 1


async def _serve(table: Table, rng: random.Random, ask: Ask, manner: Manner) -> str:
    """One request to its end, tries included. Returns the outcome's name."""
    tally, clock = table.tally, table.clock
    give_up = clock.now() + DEADLINE_S
    while True:
        router = table.routers.pick(rng)
        if router is None:
            tally.retries["no router"] += 1
            if clock.now() > give_up:
                _note(tally.failed, f"no router ran within {DEADLINE_S:.0f} s")
                return "failed"
            await asyncio.sleep(0.1)
            continue
        exchange = await _send(table, router, ask, manner)
        if exchange is None:
            _note(tally.hung, f"{router.name}: {ask} {manner}")
            return "hung"
        exchange.ended = clock.now()
        if problem := judge(ask, exchange, table.reference):
            _note(tally.wrong, f"{router.name}, {manner}, attempts {exchange.attempts}: {problem}")
            return "wrong"
        outcome = _outcome(table, router, exchange)
        if outcome is not None:
            return _count(table, outcome, exchange, router.name, ask, manner)
        tally.retries[_busy(exchange.detail) if exchange.end is End.BUSY else exchange.end.value] += 1
        if clock.now() > give_up:
            _note(tally.failed, f"never served within {DEADLINE_S:.0f} s, at last {router.name}: {exchange.detail}")
            return "failed"
        await asyncio.sleep(min(exchange.retry_after_s, _MAX_PAUSE_S) * rng.uniform(0.3, 1.0))


async def _send(table: Table, router: Ready, ask: Ask, manner: Manner) -> Exchange | None:
    """One try. None when it did not end."""
    try:
        async with asyncio.timeout(DEADLINE_S + GRACE_S):
            if manner.api == "http":
                return await over_http(router.http or "", table.model, ask, manner, table.clock)
            wire = table.routers.channel(router)
            return await over_grpc(wire, table.model, ask, manner, table.clock, DEADLINE_S)
    except TimeoutError:
        return None


def _outcome(table: Table, router: Ready, exchange: Exchange) -> str | None:
    """How it ended for good; None when a client tries again."""
    times = exchange.asked, exchange.ended
    match exchange.end:
        case End.OK | End.LEFT | End.LATE:
            return exchange.end.name.lower()
        case End.BUSY | End.UNREACHABLE:
            return None
        case _:
            if table.disturbances.happened(router.name, ("kill",), *times):
                return "router killed"
            at_once = exchange.ended - exchange.asked < _DOOR_S  # what was being answered is let end by a restart
            unheard = not exchange.arrivals and exchange.end is End.BROKEN and at_once
            if unheard and table.disturbances.happened(router.name, ("restart",), *times):
                return None  # it arrived while the door was being closed
            return "failed"


def _count(table: Table, outcome: str, exchange: Exchange, router: str, ask: Ask, manner: Manner) -> str:
    tally = table.tally
    if outcome == "failed":
        after = f"{exchange.end.value} after {exchange.ended - exchange.asked:.1f} s"
        _note(tally.failed, f"{after}, {router}: {exchange.detail}: {ask} {manner}")
    elif outcome == "ok":
        tally.tokens += exchange.completion_tokens or 0
        count_failover(tally, exchange, ask, manner, table.disturbances, router)
    return outcome


def _busy(detail: str) -> str:
    """The HTTP status of a refusal; gRPC has other names for the same."""
    word = detail.replace(":", " ").split()[0]
    return {"RESOURCE_EXHAUSTED": "429", "UNAVAILABLE": "503"}.get(word, word)


def _note(list_of_words: list[str], words: str) -> None:
    list_of_words.append(words if len(list_of_words) < _MAX_WORDS else "(and more)")
