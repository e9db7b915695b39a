"""Routers that die, and routers that start where nobody can tell them who is there (no controller, no Redis)."""

import asyncio
import contextlib
import json
import os
import queue
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cluster.config import dump_config, environment, load_config
from cluster.ray_environment import NOT_FOR_PROGRAMS, SOURCE_ROOT
from cluster.supervisor import ProgramSpec, ProgramStatus, Supervisor
from tests.integration.asks import Ask, End, ask_http
from tests.integration.stack import Stack, config, connect, post_bytes, stack, until
from tests.integration.test_ray_under_load import Door

STREAMS = 2
LONG = Ask(prompt=tuple(range(20, 60)), max_tokens=300)  # a minute at this pace: nobody waits for its end
SHORT = replace(LONG, max_tokens=5)
PATIENCE_S = 30.0
NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routers")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Stack]:
    with stack(config(prefill=1, decode=1, step_s=0.2), folder) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def streams(door: Stack) -> AsyncIterator[None]:
    """Streams that have begun. They do not end in here."""
    async with contextlib.AsyncExitStack() as stack:
        for seed in range(STREAMS):
            connection = await stack.enter_async_context(connect(door.url))
            await connection.send(post_bytes("/v1/completions", json.dumps(replace(LONG, seed=seed).body()).encode()))
            await connection.receive(1)
        yield


@contextlib.contextmanager
def lonely_router(folder: Path, file: Path) -> Iterator[Door]:
    """A router whose supervisor never hears of any worker."""
    reports: queue.Queue[ProgramStatus] = queue.Queue()
    command = (sys.executable, "-m", "router", "--config", str(file), "--name", "router-9", "--supervised")
    variables = environment({"PYTHONPATH": SOURCE_ROOT}, without=NOT_FOR_PROGRAMS)
    log = folder / "router-9.log"
    supervisor = Supervisor(ProgramSpec("router-9", "router", command, variables, log), reports.put)
    supervisor.start()
    try:
        while (status := reports.get(timeout=PATIENCE_S)).ready is None:
            assert status.restarts == 0, log.read_text()
        yield Door(status.ready.http or "", status.ready.admin or "")
    finally:
        supervisor.stop(PATIENCE_S)


async def states(door: Stack) -> dict[str, str]:
    return {worker["address"]: worker["state"] for worker in (await door.status())["workers"]}


async def sees(door: Stack, expected: dict[str, str]) -> bool:
    return await states(door) == expected


async def decode_counters(door: Stack) -> dict[str, int]:
    workers = (await door.status())["workers"]
    return next((dict(worker["counters"]) for worker in workers if worker["role"] == "decode"), {})


async def has_cancelled(door: Stack, count: int) -> bool:
    return (await decode_counters(door)).get("attempts_cancelled", 0) >= count


async def test_the_attempts_of_a_killed_router_are_cancelled(running: Stack) -> None:
    """Its successor has nothing to do with them, and sees them go before they could have ended."""
    before = await decode_counters(running)
    router = running.cluster.ready("router-0")
    async with streams(running):
        os.kill(router.pids[0], signal.SIGKILL)

        def is_new() -> bool:
            status = running.cluster.status("router-0")
            return status is not None and status.ready is not None and status.ready.epoch != router.epoch

        assert await asyncio.to_thread(running.cluster.wait, is_new, PATIENCE_S)
        await running.all_ready()
        await running.quiet(10.0)
    after = await decode_counters(running)
    assert after["attempts_cancelled"] - before.get("attempts_cancelled", 0) == STREAMS
    assert after["tokens_out"] - before.get("tokens_out", 0) < STREAMS * LONG.max_tokens
    assert (await ask_http(running, SHORT)).end is End.OK


async def test_a_router_that_nobody_tells_finds_the_workers(running: Stack, folder: Path) -> None:
    """One by the file of those last heard of, one by a seed. Other hints are wrong: a worker says a live Hello."""
    settings = load_config(folder / "config.yaml")
    prefill, decode = (running.cluster.ready(name).address for name in ("prefill-0", "decode-0"))
    no_worker = running.cluster.ready("router-0").address  # a server that knows no Watch
    assert settings.router.workers_file is not None
    assert set(json.loads(Path(settings.router.workers_file).read_text())) == {prefill, decode}
    file = folder / "lonely.json"
    file.write_text(json.dumps([no_worker, decode]))
    router = settings.router.model_copy(update={"workers_file": str(file)})
    lonely = settings.model_copy(update={"router": router, "seeds": (NOBODY, prefill)})
    (folder / "lonely.yaml").write_text(dump_config(lonely))
    with lonely_router(folder, folder / "lonely.yaml") as door:
        expected = dict.fromkeys((NOBODY, no_worker), "connecting") | dict.fromkeys((prefill, decode), "ready")
        assert await until(partial(sees, door, expected), PATIENCE_S), await states(door)
        assert (await ask_http(door, SHORT)).end is End.OK
    assert json.loads(file.read_text()) == [no_worker, decode]


@pytest.mark.verify
async def test_the_attempts_of_a_frozen_router_are_cancelled(running: Stack, folder: Path) -> None:
    """It breaks no connection: keep-alive notices. When it wakes, it goes on as if it had lost its sessions."""
    router = running.cluster.ready("router-0")
    with lonely_router(folder, folder / "config.yaml") as door:
        workers = (running.cluster.ready(name).address for name in ("prefill-0", "decode-0"))
        assert await until(partial(sees, door, dict.fromkeys(workers, "ready")), PATIENCE_S)
        before = (await decode_counters(door)).get("attempts_cancelled", 0)
        async with streams(running):
            os.kill(router.pids[0], signal.SIGSTOP)
            try:
                assert await until(partial(has_cancelled, door, before + STREAMS), 45.0)
            finally:
                os.kill(router.pids[0], signal.SIGCONT)
    await running.all_ready()
    await running.quiet(10.0)
    assert running.cluster.ready("router-0").epoch == router.epoch
    assert (await ask_http(running, SHORT)).end is End.OK
