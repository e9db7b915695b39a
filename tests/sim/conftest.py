"""Seeds are played in the background, politely, from the moment they are known to be asked for."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from xdist import is_xdist_worker

from simulation.run import Verdict, simulate

BATCH = 100
POLITE = 10  # niceness: who measures or waits for something goes first
_PLAYED = pytest.StashKey[tuple[ProcessPoolExecutor, dict[int, Future[Verdict]]]]()

Play = Callable[[int], Verdict]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Submit every seed that the collected tests will ask for, in their order."""
    asked: list[int] = []
    for item in session.items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or "play" not in getattr(item, "fixturenames", ()):
            continue
        if "seed" in parameters.params:
            asked.append(parameters.params["seed"])
        elif "first" in parameters.params:
            first = parameters.params["first"]
            asked.extend(range(first, first + BATCH))
    if asked and not session.config.option.collectonly and not is_xdist_worker(session):
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(mp_context=spawn, initializer=os.nice, initargs=(POLITE,))
        session.stash[_PLAYED] = pool, {seed: pool.submit(simulate, seed) for seed in asked}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing is left behind, whatever was still to be played."""
    played = session.stash.get(_PLAYED, None)
    if played is not None:
        played[0].shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def play(request: pytest.FixtureRequest) -> Play:
    """The verdict on a seed; a part of a run has its processor and plays the seeds itself."""
    if is_xdist_worker(request):
        return simulate
    _, verdicts = request.session.stash[_PLAYED]
    return lambda seed: verdicts.pop(seed).result()
