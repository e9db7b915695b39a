"""Programs that are told to leave under load (FAULTS F14): exit code 0 within the bound, and no client notices."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from cluster.core.errors import Unavailable
from cluster.local import LocalCluster
from cluster.pipe import ROLES, Ready
from tests.integration.asks import EOS, PATH, Ask, End, GrpcClient, Outcome, ask_http, judge_http, random_ask
from tests.integration.stack import CLOCK, Stack, config, connect, pause, post_bytes, stack, until

DRAIN_S = 15.0  # longer than any answer takes
HASTY_S = 0.5  # shorter
DOOR_S = 2.0  # within which a call that a closing door never took is hung up on
FLUSH_S = 15.0  # what a busy machine may need beside the bound itself
RESTART_S = 30.0
ROUTER = {"http_port": 0, "grpc_port": 0, "local_max_tokens": 0, "policy": "least_loaded", "deadline_s": 30.0}


class Door(Stack):
    """The same cluster through the door of one of its routers."""

    def __init__(self, cluster: LocalCluster, router: str) -> None:
        super().__init__(cluster)
        self._router = router

    @property
    def url(self) -> str:
        return self.cluster.ready(self._router).http or ""

    @property
    def admin_url(self) -> str:
        return self.cluster.ready(self._router).admin or ""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = config(step_s=0.02, router={**ROUTER, "replicas": 2}, timing={"drain_s": DRAIN_S})
    with LocalCluster(settings, tmp_path_factory.mktemp("rolling")) as cluster:
        cluster.wait_ready()
        yield Stack(cluster)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = config(prefill=1, step_s=0.02, router=ROUTER, timing={"drain_s": HASTY_S})
    with stack(settings, tmp_path_factory.mktemp("hasty")) as cluster:
        yield cluster


async def drains(cluster: LocalCluster, name: str) -> float:
    """SIGTERM to one program; returns when its successor is ready. Seconds until it had left."""
    before, began = cluster.ready(name), CLOCK.now()
    os.kill(before.pids[0], signal.SIGTERM)
    assert await asyncio.to_thread(cluster.wait, lambda: _left(cluster, before), RESTART_S), cluster.log(name)[-2000:]
    took = CLOCK.now() - began
    assert await asyncio.to_thread(cluster.wait, lambda: _ready_again(cluster, before), RESTART_S)
    status = cluster.status(name)
    assert status is not None
    assert (status.last_exit, status.early_deaths, status.restarts) == (0, 0, 0), cluster.log(name)[-2000:]
    return took


def _left(cluster: LocalCluster, before: Ready) -> bool:
    status = cluster.status(before.name)
    return status is not None and status.pid != before.pids[0]


def _ready_again(cluster: LocalCluster, before: Ready) -> bool:
    status = cluster.status(before.name)
    return status is not None and status.ready is not None and status.ready.epoch != before.epoch


class Client:
    """Asks one request after the other at one door of two; a router that leaves, or has left, sends it to the other."""

    def __init__(self, running: Stack, name: str) -> None:
        self._cluster = running.cluster
        self._grpc = name.startswith("grpc")
        self._random = random.Random(name)
        self.outcomes: list[Outcome] = []
        self.sent_elsewhere = 0
        self.going = True

    async def run(self) -> None:
        while self.going:
            ask = random_ask(self._random)
            if self._random.random() < 0.5:
                ask = replace(ask, max_tokens=150, ignore_eos=True, stop_token_ids=())  # lasts
            self.outcomes.append(await self._persist(ask))

    async def _persist(self, ask: Ask) -> Outcome:
        """What was refused before it began may be asked again; what began must end well."""
        give_up = CLOCK.now() + 20.0
        while CLOCK.now() < give_up:
            router = self._random.choice(["router-0", "router-1"])
            with contextlib.suppress(Unavailable, ConnectionRefusedError):
                outcome = await (self._ask_grpc(ask, router) if self._grpc else self._ask_http(ask, router))
                if outcome is not None:
                    return outcome
            self.sent_elsewhere += 1
            await pause(0.05)
        raise AssertionError(f"nobody takes {ask}")

    async def _ask_http(self, ask: Ask, router: str) -> Outcome | None:
        door = Door(self._cluster, router)
        asked = CLOCK.now()
        answer = await door.call(post_bytes(PATH, json.dumps(ask.body()).encode()), within_s=30.0)
        if answer.status == 0:  # the listener closed before our connection was accepted; what it took it lets end
            assert CLOCK.now() - asked < DOOR_S, f"an answer was dropped after {CLOCK.now() - asked:.1f} s"
            return None
        if answer.status == 503:
            assert answer.headers["retry-after"], answer
            return None
        return judge_http(ask, answer)

    async def _ask_grpc(self, ask: Ask, router: str) -> Outcome | None:
        began = asyncio.Event()
        async with GrpcClient(Stack(self._cluster), self._cluster.ready(router).address) as client:
            outcome = await client.ask(ask, timeout_s=30.0, started=began.set)
        return None if outcome.error.startswith("UNAVAILABLE") and not began.is_set() else outcome


@pytest.mark.verify
async def test_a_rolling_restart_of_every_program_loses_nothing(running: Stack) -> None:
    """First one of every role, at the same time, then the others."""
    clients = [Client(running, name) for name in ("http 0", "http 1", "http 2", "grpc 0")]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
        took = []
        for index in range(2):
            names = [f"{role}-{index}" for role in ROLES]
            took += await asyncio.gather(*(drains(running.cluster, name) for name in names))
        for client in clients:
            client.going = False
    ends = Counter((outcome.end, outcome.error) for client in clients for outcome in client.outcomes)
    assert set(ends) == {(End.OK, "")}, ends
    assert max(took) < DRAIN_S + FLUSH_S, took
    assert sum(client.sent_elsewhere for client in clients) > 0
    for router in ("router-0", "router-1"):
        await Door(running.cluster, router).quiet()


async def test_what_does_not_end_within_the_bound_is_handed_over(hasty: Stack) -> None:
    """Streams that last longer than the bound go on elsewhere, first from one worker and then from the other."""
    prompts = [tuple(random.Random(i).choices(range(EOS), k=20 + 20 * i)) for i in range(4)]
    for name in ("decode-0", "decode-1"):
        asks = [Ask(prompt, max_tokens=100, stream=i % 2 == 0) for i, prompt in enumerate(prompts)]
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask_http(hasty, ask)) for ask in asks]
            assert await until(partial(writes, hasty, name), 10.0)
            assert await drains(hasty.cluster, name) < HASTY_S + FLUSH_S
        assert {answer.result().end for answer in answers} == {End.OK}
        await hasty.all_ready()
    counters = await hasty.counters()
    assert counters["attempts_handed_over"] >= 2
    assert {"attempts_failed", "attempts_preempted"}.isdisjoint(counters)
    await hasty.quiet()


async def writes(running: Stack, name: str) -> bool:
    return any(w["worker"] == name and w["running"] for w in (await running.status())["workers"])


async def test_a_router_lets_streams_end_and_tells_those_past_its_bound(hasty: Stack) -> None:
    """Last: the router's successor has another address."""
    long = Ask(prompt=tuple(range(1, 40)), max_tokens=400)
    door = Door(hasty.cluster, "router-0")
    url, began = door.url, asyncio.Event()
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(ask_http(door, long, started=began.set))
        await began.wait()
        leaving = group.create_task(drains(hasty.cluster, "router-0"))

        async def refuses() -> bool:
            try:
                async with connect(url):
                    return False
            except ConnectionRefusedError:
                return True

        assert await until(refuses, 5.0)
    assert stream.result() == Outcome(End.ERROR, "after headers: the router is shutting down")
    assert leaving.result() < HASTY_S + FLUSH_S
    await hasty.all_ready()
    await hasty.quiet()
