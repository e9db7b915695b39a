"""Real programs under Ray, scaled and drained by the command line while streams run: no client notices."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.cli.start import stop_head
from cluster.pipe import MODULES
from tests.integration.asks import End, Outcome, ask_http, random_ask
from tests.integration.stack import Stack, config
from tests.integration.test_ray_cluster import Cluster

CLIENTS = 3


class Door(Stack):
    """The HTTP door of a cluster that Ray runs."""

    def __init__(self, url: str, admin_url: str = "") -> None:
        self._url = url
        self._admin_url = admin_url
        self._headers = {}

    @property
    def url(self) -> str:
        return self._url

    @property
    def admin_url(self) -> str:
        return self._admin_url


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("ray"), config(prefill=1, decode=1, step_s=0.02), MODULES)
    yield one
    stop_head(one.head, one.run_dir)


async def client(door: Door, seed: int, stop: asyncio.Event, outcomes: list[Outcome]) -> None:
    drawn = random.Random(seed)
    while not stop.is_set():
        outcomes.append(await ask_http(door, replace(random_ask(drawn), max_tokens=100, ignore_eos=True)))


def resize(cluster: Cluster) -> None:
    """Up, one program renewed, and down again."""
    for arguments, decode in (
        (["scale", "prefill=3", "decode=2"], 2),
        (["drain", "decode-0"], 2),
        (["scale", "prefill=1", "decode=1"], 1),
        (["drain", "prefill-0"], 1),
    ):
        done = cluster.command(*arguments)
        assert done.returncode == 0, done.stderr
        cluster.until(lambda status, wanted=decode: status.ready and status.desired["decode"] == wanted)  # type: ignore[misc]


@pytest.mark.verify
async def test_pools_are_scaled_and_programs_drained_under_load(cluster: Cluster) -> None:
    router = cluster.program("router-0").ready
    assert router is not None
    door, stop, outcomes = Door(router.http or ""), asyncio.Event(), list[Outcome]()
    async with asyncio.TaskGroup() as group:
        for seed in range(CLIENTS):
            group.create_task(client(door, seed, stop, outcomes))
        await asyncio.to_thread(resize, cluster)
        stop.set()
    assert Counter((outcome.end, outcome.error) for outcome in outcomes) == {(End.OK, ""): len(outcomes)}
    assert len(outcomes) > CLIENTS
    assert {(p.restarts, p.early_deaths) for p in cluster.last.programs} == {(0, 0)}
