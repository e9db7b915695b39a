"""A chaos run: a real cluster under mixed load while its processes are killed, stopped and restarted.

1. start      every program of the cluster, with supervisors as threads of this process (cluster/local.py)
2. record     a real model's answers before anything is disturbed; the tracer's are computed
3. disturb    clients ask (load.py) while processes of each role suffer (disturb.py), for the given time
4. calm       no more faults, all programs ready again, clients end what they had asked
5. quiet      two seconds later nothing may be in use anywhere (I2); `timing.resume_s` more for what dead routers left
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from chaos.ask import Ask, random_ask
from chaos.disturb import Disturbances, Disturber
from chaos.load import Table, clients
from chaos.record import record
from chaos.reference import RecordedReference, Reference, TracerReference
from chaos.report import Report
from chaos.routers import Routers
from chaos.settings import ChaosSettings
from chaos.tally import Tally
from cluster.core.clock import Clock, SystemClock
from cluster.local import LocalCluster
from engine.messages import TracerModel

READY_S = 180.0
CALM_S = 60.0
QUIET_S = 2.0
_LOOK_S = 0.5
_NEWS_S = 30.0

Say = Callable[[str], None]


def run_chaos(settings: ChaosSettings, folder: Path, say: Say, clock: Clock | None = None) -> Report:
    """One run; logs of all programs are left in `folder`. Raises Unavailable when the cluster does not start."""
    with LocalCluster(settings.cluster(), folder) as cluster:
        cluster.wait_ready(READY_S)
        return asyncio.run(_run(settings, cluster, say, clock or SystemClock()))


async def _run(settings: ChaosSettings, cluster: LocalCluster, say: Say, clock: Clock) -> Report:
    routers = Routers(cluster)
    disturber = Disturber(cluster, settings.seed, settings.rest_s, clock, routers.sees)
    try:
        await _until(lambda: _all_ready(cluster, routers), READY_S, clock)
        reference, next_ask = await _prepare(settings, cluster, routers, clock, say)
        tally, model = Tally(), cluster.config.model_name
        table = Table(settings, model, routers, reference, next_ask, disturber.disturbances, clock, tally)
        began = clock.now()
        await _disturbed(table, disturber, say)
        seconds = clock.now() - began
        calm = await _until(lambda: _all_ready(cluster, routers), CALM_S, clock)
        # What a router that died near the end left behind is kept until it has been missed for long enough.
        leaked = await _left_in_use(routers, clock, QUIET_S + cluster.config.timing.resume_s)
        await routers.look()
        faults, unrecovered = disturber.disturbances.kinds(), [*disturber.unrecovered]
        if not calm:
            unrecovered.append("every program, ready in the eyes of every router")
        crashed = _crashed(cluster, disturber.disturbances)
        counted = routers.workers.sums(), routers.routers.sums()
        return Report(seconds, tally, faults, *counted, unrecovered=unrecovered, leaked=leaked, crashed=crashed)
    finally:
        await routers.close()


async def _disturbed(table: Table, disturber: Disturber, say: Say) -> None:
    """Load and faults for the given time; faults end, and are recovered from, before the load does."""
    calm, done = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(clients(table, done))
        watching = group.create_task(_watch(table, say))
        faults = group.create_task(disturber.run(calm))
        await asyncio.sleep(table.settings.seconds)
        calm.set()
        await faults
        done.set()
        watching.cancel()


async def _watch(table: Table, say: Say) -> None:
    """Counters of lives that will end, and a line now and then."""
    told = table.clock.now()
    while True:
        await asyncio.sleep(_LOOK_S)
        await table.routers.look()
        if table.clock.now() - told >= _NEWS_S:
            told = table.clock.now()
            tally = table.tally
            bad = len(tally.wrong) + len(tally.failed) + len(tally.hung)
            faults = len(table.disturbances.done)
            say(f"{faults} faults, {tally.requests} requests, {tally.failovers} failovers, {bad} bad")


async def _prepare(
    settings: ChaosSettings, cluster: LocalCluster, routers: Routers, clock: Clock, say: Say
) -> tuple[Reference, Callable[[random.Random], Ask]]:
    appetite = settings.appetite()
    if settings.is_tracer:
        spec = TracerModel(**cluster.config.engine.tracer.model_dump())
        return TracerReference(spec), lambda rng: random_ask(rng, appetite)
    say("asking everything once, undisturbed")
    recorded: RecordedReference = await record(settings, cluster.config.model_name, routers, clock)
    asks = recorded.asks
    return recorded, lambda rng: rng.choice(asks)


async def _left_in_use(routers: Routers, clock: Clock, within_s: float) -> dict[str, int]:
    """What is still in use so long after the traffic."""
    left: dict[str, int] = {}

    async def quiet() -> bool:
        left.clear()
        left.update(await routers.in_use())
        return not left

    await _until(quiet, within_s, clock)
    return left


def _crashed(cluster: LocalCluster, disturbances: Disturbances) -> list[str]:
    """Programs that died more often than they were killed. A stall may last long enough to end an engine (I9)."""
    found = []
    for name in cluster.names:
        status = cluster.status(name)
        died, killed = 0 if status is None else status.restarts, disturbances.count(name, ("kill", "stall"))
        if died > killed:
            found.append(f"{name} died {died} times, was killed {killed} times; its log says why")
    return found


async def _all_ready(cluster: LocalCluster, routers: Routers) -> bool:
    """Every program runs, and every router sees every worker."""
    said = await routers.look()
    wanted = cluster.config.router.replicas
    workers = len(cluster.names) - wanted
    ready = [sum(w["state"] == "ready" for w in cast("list[dict[str, object]]", each["workers"])) for each in said]
    return ready == [workers] * wanted


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float, clock: Clock) -> bool:
    give_up = clock.now() + within_s
    while not await condition():
        if clock.now() > give_up:
            return False
        await asyncio.sleep(0.1)
    return True
