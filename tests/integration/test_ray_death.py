"""Ray's GCS and its Redis die under a cluster of real programs: no stream ends, new requests are served, all heals.

The tests share one cluster and go from bad to worse; the last one ends it.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial

import psutil
import pytest

from cluster.cli.start import stop_head
from cluster.pipe import MODULES
from tests.integration.asks import End, Outcome
from tests.integration.stack import config, until
from tests.integration.test_ray_cluster import PATIENCE_S, Cluster, gone, processes_of
from tests.integration.test_ray_under_load import Door, client
from tests.integration.valkey import Redis

pytestmark = pytest.mark.verify

CLIENTS = 3


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("valkey"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, valkey: Redis) -> Iterator[Cluster]:
    settings = config(prefill=1, decode=1, step_s=0.02)
    one = Cluster(tmp_path_factory.mktemp("ray"), settings, MODULES, redis_url=valkey.url)
    yield one
    stop_head(one.head, one.run_dir)


class Load:
    """Clients that ask one request after the other."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.outcomes: list[Outcome] = []

    async def more(self) -> None:
        """Until every client has had an answer to a request that it began after now."""
        goal = len(self.outcomes) + 2 * CLIENTS

        async def reached() -> bool:
            return len(self.outcomes) >= goal

        assert await until(reached, PATIENCE_S), self.outcomes


@contextlib.asynccontextmanager
async def load(cluster: Cluster) -> AsyncIterator[Load]:
    """Streams run all the time; when the context is left, each must have been right and whole."""
    router = cluster.program("router-0").ready
    assert router is not None
    flow = Load()
    async with asyncio.TaskGroup() as group:
        for seed in range(CLIENTS):
            group.create_task(client(Door(router.http or ""), seed, flow.stop, flow.outcomes))
        try:
            await flow.more()
            yield flow
        finally:
            flow.stop.set()
    assert Counter((outcome.end, outcome.error) for outcome in flow.outcomes) == {(End.OK, ""): len(flow.outcomes)}


def gcs_of(cluster: Cluster) -> list[psutil.Process]:
    """The GCS process, if one runs."""
    found = []
    for process in psutil.Process(cluster.head.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "gcs_server" and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def runs_again(cluster: Cluster, before: psutil.Process) -> bool:
    return any(process.pid != before.pid for process in gcs_of(cluster))


async def has_told(cluster: Cluster, word: str) -> bool:
    return word in cluster.run_dir.log_file("head").read_text()


def pids(cluster: Cluster) -> dict[str, int | None]:
    return {program.name: program.pid for program in cluster.last.programs}


def scale(cluster: Cluster, decode: int) -> None:
    done = cluster.command("scale", "decode", str(decode))
    assert done.returncode == 0, done.stderr
    cluster.until(lambda status: status.ready and status.desired["decode"] == decode)


def kill_program(cluster: Cluster, name: str) -> None:
    """Its supervisor starts it again, and the controller hears of it."""
    killed = cluster.program(name)
    processes_of(killed)[0].kill()
    cluster.comes_back(killed)


def kill_supervisor(cluster: Cluster, name: str) -> None:
    """Ray starts it again: its GCS must know how."""
    killed = cluster.program(name)
    psutil.Process(processes_of(killed)[0].ppid()).kill()
    assert cluster.comes_back(killed).supervisor != killed.supervisor
    cluster.until(lambda status: status.ready)


async def test_a_killed_gcs_is_started_again_and_nobody_notices(cluster: Cluster, valkey: Redis) -> None:
    namespace = cluster.run_dir.ray_namespace()
    assert f"RAY{namespace}@NODE" in valkey.holds()
    before = pids(cluster)
    async with load(cluster) as flow:
        for _ in range(2):
            (gcs,) = gcs_of(cluster)
            gcs.kill()
            assert await until(partial(runs_again, cluster, gcs), PATIENCE_S)
            await flow.more()
        assert pids(cluster) == before
        await asyncio.to_thread(scale, cluster, 2)


async def test_without_redis_there_is_no_gcs_and_programs_do_without(cluster: Cluster, valkey: Redis) -> None:
    async with load(cluster) as flow:
        (gcs,) = gcs_of(cluster)
        valkey.kill()
        assert await asyncio.to_thread(gone, [gcs])
        await flow.more()
        await asyncio.to_thread(kill_program, cluster, "decode-1")
        await flow.more()
        refused = await asyncio.to_thread(cluster.command, "status")
        assert (refused.returncode, "does not answer" in refused.stderr) == (1, True), refused
        assert not gcs_of(cluster)
        valkey.again()
        assert await until(partial(runs_again, cluster, gcs), PATIENCE_S)
        shown = await asyncio.to_thread(cluster.command, "status")
        assert shown.returncode == 0, shown.stderr
        await asyncio.to_thread(kill_supervisor, cluster, "decode-0")
        await flow.more()
        await asyncio.to_thread(kill_program, cluster, "decode-1")


async def test_an_empty_redis_is_not_taken_for_the_cluster_and_down_leaves_nothing(
    cluster: Cluster, valkey: Redis
) -> None:
    before = pids(cluster)
    async with load(cluster) as flow:
        (gcs,) = gcs_of(cluster)
        valkey.kill()
        assert await asyncio.to_thread(gone, [gcs])
        valkey.again("second")
        assert await until(partial(has_told, cluster, "has lost its tables"), PATIENCE_S)
        await flow.more()
        assert not gcs_of(cluster)
    assert pids(cluster) == before
    valkey.kill()
    valkey.again()
    assert await until(partial(runs_again, cluster, gcs), PATIENCE_S)
    everything = cluster.processes()
    done = await asyncio.to_thread(cluster.command, "down")
    assert done.returncode == 0, done.stderr
    assert gone(everything)
    assert valkey.holds() == set()
