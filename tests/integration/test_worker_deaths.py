"""Workers that die or freeze under load (FAULTS F03, F04, F11): nothing hangs, nothing lies, the pool heals itself."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

import pytest

from cluster.pipe import Ready
from tests.integration.asks import End, GrpcClient, Outcome, ask_http, random_ask
from tests.integration.stack import CLOCK, Stack, config, pause, stack, until

CLIENTS = [*(f"stream {i}" for i in range(8)), *(f"grpc {i}" for i in range(2)), "whole 0", "whole 1"]
STREAMS = len(CLIENTS)
RUNNING = 8  # streams that must run when something dies
SERVER, ENGINE = 0, 1
DEADLINE_S = 15.0
RESTART_S = 30.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = config(
        step_s=0.015,
        router={
            "http_port": 0,
            "grpc_port": 0,
            "local_max_tokens": 0,
            "policy": "least_loaded",
            "deadline_s": DEADLINE_S,
        },
        timing={"suspect_s": 1.5},
    )
    with stack(settings, tmp_path_factory.mktemp("deaths")) as cluster:
        yield cluster


class Traffic:
    """Clients that ask one request after the other until told to stop; each answer is judged."""

    def __init__(self, running: Stack, seed: str) -> None:
        self._running = running
        self._random = random.Random(seed)
        self._going = True
        self._open: set[str] = set()
        self._under_way = asyncio.Event()
        self.outcomes: list[Outcome] = []

    async def client(self, name: str, grpc: GrpcClient) -> None:
        """`name`: "stream 3", "grpc 0" or "whole 1"."""
        kind = name.split()[0]
        while self._going:
            tokens = self._random.randrange(30, 70)
            ask = replace(random_ask(self._random), max_tokens=tokens, stream=kind != "whole")
            asked = CLOCK.now()
            async with asyncio.timeout(DEADLINE_S + 3):
                started = partial(self._started, name)
                outcome = await (
                    grpc.ask(ask, timeout_s=DEADLINE_S, started=started)
                    if kind == "grpc"
                    else ask_http(self._running, ask, started=started)
                )
            assert CLOCK.now() - asked < DEADLINE_S + 2, (ask, outcome)
            self._open.discard(name)
            self.outcomes.append(outcome)
            if outcome.end is End.ERROR:
                await pause(0.5)  # half of what retry-after says

    def _started(self, name: str) -> None:
        self._open.add(name)
        if len(self._open) >= RUNNING:
            self._under_way.set()

    async def under_way(self) -> None:
        """Until RUNNING streams run at the same time."""
        await asyncio.wait_for(self._under_way.wait(), DEADLINE_S)

    async def more(self, count: int) -> None:
        """Until `count` more requests have ended."""
        goal = len(self.outcomes) + count

        async def reached() -> bool:
            return len(self.outcomes) >= goal

        assert await until(reached, 2 * DEADLINE_S), self.outcomes

    def stop(self) -> None:
        self._going = False

    def ends(self) -> Counter[End]:
        return Counter(outcome.end for outcome in self.outcomes)

    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes)


@contextlib.asynccontextmanager
async def traffic(running: Stack, seed: str) -> AsyncIterator[Traffic]:
    """Clients that are under way; when the context is left they end, and then everything must be quiet."""
    flow = Traffic(running, seed)
    async with GrpcClient(running) as grpc, asyncio.TaskGroup() as group:
        for name in CLIENTS:
            group.create_task(flow.client(name, grpc))
        try:
            await flow.under_way()
            yield flow
        finally:
            flow.stop()
    await running.quiet()


@contextlib.contextmanager
def frozen(pids: tuple[int, ...]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def comes_back(running: Stack, before: Ready) -> None:
    """Until the program runs again, as another peer."""

    def restarted() -> bool:
        status = running.cluster.status(before.name)
        return status is not None and status.ready is not None and status.ready.epoch != before.epoch

    came = await asyncio.to_thread(running.cluster.wait, restarted, RESTART_S)
    assert came, running.cluster.log(before.name)[-2000:]


async def says(running: Stack, path: str, status: int) -> bool:
    return (await running.get(path)).status == status


async def is_frozen(running: Stack, name: str) -> bool:
    """Whether the router noticed."""
    workers = (await running.status())["workers"]
    return any(w["worker"] == name and w["state"] != "ready" for w in workers)


async def serves(running: Stack, name: str, counter: str) -> None:
    """Until the worker, whose counters began at 0, has done some of the traffic."""

    async def used() -> bool:
        return any(w["worker"] == name and w["counters"].get(counter) for w in (await running.status())["workers"])

    assert await until(used, DEADLINE_S), await running.status()


def assert_untouched(running: Stack, before: dict[str, tuple[int, ...]], names: list[str]) -> None:
    now = running.pids()
    assert {name: now[name] for name in names} == {name: before[name] for name in names}


async def test_killed_servers_are_replaced(running: Stack) -> None:
    """The server process of a prefill worker, then that of a decode worker, while streams run."""
    pids = running.pids()
    async with traffic(running, "servers") as flow:
        prefill, decode = running.cluster.ready("prefill-0"), running.cluster.ready("decode-1")
        os.kill(prefill.pids[SERVER], signal.SIGKILL)
        await flow.more(STREAMS)
        os.kill(decode.pids[SERVER], signal.SIGKILL)
        await asyncio.gather(comes_back(running, prefill), comes_back(running, decode))
        await asyncio.gather(serves(running, "prefill-0", "jobs_accepted"), serves(running, "decode-1", "tokens_out"))
    assert flow.ends()[End.ERROR] == 0, flow.errors()
    assert flow.ends()[End.OK] > STREAMS
    assert_untouched(running, pids, ["prefill-1", "decode-0", "router-0"])


async def test_killed_engines_and_then_a_whole_pool(running: Stack) -> None:
    """The engines of a prefill and a decode worker; then that of the last decode worker, before the other is back."""
    pids = running.pids()
    async with traffic(running, "engines") as flow:
        killed = [running.cluster.ready(name) for name in ("prefill-0", "decode-1", "decode-0")]
        for ready in killed[:2]:
            os.kill(ready.pids[ENGINE], signal.SIGKILL)
        await flow.more(STREAMS)
        assert flow.ends()[End.ERROR] == 0, flow.errors()
        os.kill(killed[2].pids[ENGINE], signal.SIGKILL)
        assert await until(lambda: says(running, "/ready", 503), 3.0)
        assert await says(running, "/live", 200)
        await asyncio.gather(*(comes_back(running, ready) for ready in killed))
        await running.all_ready(RESTART_S)
        assert await says(running, "/ready", 200)
        await flow.more(STREAMS)
        assert flow.outcomes[-1].end is End.OK
        await asyncio.gather(serves(running, "prefill-0", "jobs_accepted"), serves(running, "decode-1", "tokens_out"))
    assert flow.outcomes[-1].end is End.OK
    assert_untouched(running, pids, ["prefill-1", "router-0"])


async def test_frozen_workers(running: Stack) -> None:
    """Frozen for longer than routers and peers have patience, then thawed: the same processes go on."""
    pids = running.pids()
    async with traffic(running, "frozen") as flow:
        for name in ("prefill-1", "decode-0"):
            with frozen(pids[name]):
                assert await until(partial(is_frozen, running, name), DEADLINE_S)
                await flow.more(STREAMS)
            await running.all_ready(DEADLINE_S)
    assert flow.ends()[End.ERROR] == 0, flow.errors()
    assert flow.ends()[End.OK] > STREAMS
    assert running.pids() == pids


@pytest.mark.verify
@pytest.mark.parametrize("name", ["prefill-1", "decode-0"])
async def test_frozen_engine(running: Stack, name: str) -> None:
    """The server lives and its heart beats, but no plan comes back: it gives its engine up and is replaced (I9)."""
    pids = running.pids()
    async with traffic(running, "engine frozen") as flow:
        ready = running.cluster.ready(name)
        with frozen(pids[name][ENGINE:]):
            await comes_back(running, ready)
        await running.all_ready(RESTART_S)
    slow = [
        error for error in flow.errors() if "not finished within" in error
    ]  # that long a stall may cost the deadline
    assert flow.ends()[End.ERROR] == sum(flow.errors()[error] for error in slow), flow.errors()
    assert_untouched(running, pids, [other for other in pids if other != name])
