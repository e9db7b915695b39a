"""Memory of every process under a steady load of which a part leaves (FAULTS R14): after a warm-up it grows no more."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.asks import End
from tests.integration.stack import Stack, config, stack
from tests.integration.test_split_cluster import load

ROUND = 1000  # requests
WARM_UP = 3
MEASURED = 5
MOST_MB = 1.0  # per round, by the slope of a line through all measurements


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(config(), tmp_path_factory.mktemp("soak")) as cluster:
        yield cluster


def resident_mb(running: Stack) -> dict[str, float]:
    """Memory of the server and the engine of each program."""
    return {
        f"{name}/{place}": psutil.Process(pid).memory_info().rss / 2**20
        for name, pids in running.pids().items()
        for place, pid in enumerate(pids)
    }


@pytest.mark.verify
async def test_memory_does_not_grow_with_the_requests_served(running: Stack, tmp_path: Path) -> None:
    seen: dict[str, list[float]] = {name: [] for name in resident_mb(running)}
    for number in range(WARM_UP + MEASURED):
        ends = await load(running, ROUND, f"soak {number}", leaving=0.05)
        assert ends[End.OK] > 0.9 * ROUND
        if number >= WARM_UP:
            for name, size in resident_mb(running).items():
                seen[name].append(size)
    slopes = {name: statistics.linear_regression(range(MEASURED), sizes).slope for name, sizes in seen.items()}
    assert all(slope < MOST_MB for slope in slopes.values()), f"MB per {ROUND} requests: {slopes}; {seen}"
