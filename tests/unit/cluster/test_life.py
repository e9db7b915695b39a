"""The life of a worker process: it notices when it did not run."""

import asyncio
from typing import Any, cast

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import IntegrityError
from cluster.worker import TICK_S, Life, OwnErrors, _tick


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

    unused = cast("Any", None)
    life = Life(unused, unused, 1, (), tick, (), unused, unused, lambda s: events.append(f"slept {s:.1f}"))
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
