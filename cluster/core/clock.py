"""Time as a dependency. `SystemClock` is the only place that reads the machine's clock; tests own a `ManualClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. `now` never goes back and has no epoch; `wall` is Unix time, for people and for other machines."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


def sleep(seconds: float) -> None:
    """Block this thread. For modelled durations only (the tracer's steps); injected, so tests replace it."""
    time.sleep(seconds)


class SystemClock:
    """The machine's monotonic and wall clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: {seconds}")
        self._now += seconds
