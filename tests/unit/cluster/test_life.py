"""The life of a worker process: it notices when it did not run, and it leaves in order."""

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from cluster.core.clock import ManualClock
from cluster.core.config import TimingSettings
from cluster.core.errors import IntegrityError
from cluster.worker import FLUSH_S, TICK_S, Life, OwnErrors, _drain, _tick
from router.server import CUT_S, LINGER_S


def a_life(**what: Any) -> Life:
    parts = {"server": None, "publisher": None, "epoch": 1, "pids": (), "tick": None, "tasks": ()}
    unused = dict.fromkeys(("idle", "drain", "hand_over", "flushed"))
    return Life(**cast("Any", {**parts, **unused, **what}))


class Leaving:
    """A worker with some work, `steps` looks from being idle; every look at the clock takes a second."""

    def __init__(self, steps: int, flushes: int = 1) -> None:
        self.said: list[str] = []
        self._left = {"idle": steps, "flushed": flushes}
        self.clock = ManualClock()
        self.server = self.publisher = self
        names = ("drain", "hand_over")
        acts = {name: partial(self.said.append, name) for name in names}
        looks = {name: partial(self._look, name) for name in self._left}
        self.life = a_life(server=self, publisher=self, **acts, **looks)

    def publish_status(self) -> None:
        self.said.append("status")

    async def set_serving(self, serving: bool) -> None:
        self.said.append(f"serving {serving}")

    def _look(self, name: str) -> bool:
        self.said.append(f"{name}?")
        self.clock.advance(1.0)
        self._left[name] -= 1
        return self._left[name] <= 0


async def test_a_worker_tells_routers_first_and_leaves_when_nothing_runs() -> None:
    worker = Leaving(steps=2)
    await _drain(worker.life, worker.clock, [asyncio.get_running_loop().create_future()], 30.0)
    assert worker.said == ["drain", "status", "serving False", "idle?", "idle?", "flushed?"]


async def test_a_worker_hands_over_what_does_not_end_in_time_and_flushes() -> None:
    worker = Leaving(steps=99, flushes=2)
    await _drain(worker.life, worker.clock, [asyncio.get_running_loop().create_future()], 2.0)
    assert worker.said[3:] == ["idle?", "idle?", "hand_over", "flushed?", "flushed?"]


async def test_a_worker_whose_engine_ends_while_it_drains_waits_for_nothing() -> None:
    worker = Leaving(steps=99, flushes=99)
    engine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine.set_result(None)
    await _drain(worker.life, worker.clock, [engine], 30.0)
    assert worker.said.count("idle?") == worker.said.count("flushed?") == 1


@pytest.mark.parametrize("drain_s", [0.1, 30.0, 3600.0])
def test_nobody_ends_a_program_that_still_drains(drain_s: float) -> None:
    """One setting, and everybody who waits is more patient than those it waits for."""
    timing = TimingSettings(drain_s=drain_s)
    worker, router = drain_s + FLUSH_S + 10 * TICK_S, drain_s + LINGER_S + CUT_S + 1.0
    assert max(worker, router) < timing.program_stop_s < timing.supervisor_stop_s < timing.cluster_stop_s


class Readings(ManualClock):
    """A clock that shows one time after the other."""

    def __init__(self, *times: float) -> None:
        super().__init__()
        self._times = iter(times)

    def now(self) -> float:
        return next(self._times)


async def test_a_process_that_was_frozen_says_so_before_it_judges_others() -> None:
    events: list[str] = []
    second_tick = asyncio.Event()

    def tick() -> None:
        events.append("tick")
        if len(events) > 1:
            second_tick.set()

    life = a_life(tick=tick, slept=lambda s: events.append(f"slept {s:.1f}"))
    on_time, late = (0.0, 0.3 + TICK_S), (1.0, 8.0 + TICK_S)
    ticking = asyncio.ensure_future(_tick(life, Readings(*on_time, *late, 9.0)))
    await asyncio.wait_for(second_tick.wait(), 5.0)
    ticking.cancel()
    assert events == ["tick", "slept 7.0", "tick"]


async def test_an_error_of_our_own_inside_a_stream_ends_the_life_and_not_only_the_stream() -> None:
    errors = OwnErrors()
    for problem in (IntegrityError("first"), KeyError("second")):
        with pytest.raises(type(problem)), errors.end_this_life():
            raise problem
    assert isinstance(errors.future.exception(), IntegrityError)
