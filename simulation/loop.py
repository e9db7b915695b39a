"""Virtual time: one heap of events, one clock, one source of chance. A seed is the whole story of a run.

An event is a call at a time. Events at the same time run in the order in which they were made. Nothing here waits: the
clock jumps from event to event.
"""

import heapq
import random
from collections.abc import Callable

Call = Callable[[], None]
START = 100.0


class LoopClock:
    """A Clock (cluster/core/clock.py) that shows a loop's time."""

    def __init__(self, loop: "Loop") -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._loop.now


class Loop:
    """Runs calls in order of time. `trace`, when given, gets one line per thing worth telling."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.now = START
        self.clock = LoopClock(self)
        self.random = random.Random(f"headrace simulation {seed}")
        self.events = 0
        self._heap: list[tuple[float, int, Call]] = []
        self._made = 0
        self._trace = trace

    @property
    def traced(self) -> bool:
        """Whether `log` goes anywhere: texts that cost time to make are made only then."""
        return self._trace is not None

    def at(self, when: float, call: Call) -> None:
        """Run `call` at `when`, or now if that is past."""
        self._made += 1
        heapq.heappush(self._heap, (when, self._made, call))

    def after(self, seconds: float, call: Call) -> None:
        self._made += 1
        heapq.heappush(self._heap, (self.now + seconds, self._made, call))

    def step(self) -> bool:
        """Run the next event. False when there is none."""
        if not self._heap:
            return False
        when, _, call = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        self.events += 1
        call()
        return True

    def run_until(self, stop: float) -> None:
        """Run events up to the first one at `stop` or later, that one included. Raises IndexError when none is left."""
        heap, pop = self._heap, heapq.heappop
        while self.now < stop:
            when, _, call = pop(heap)
            if when > self.now:
                self.now = when
            self.events += 1
            call()

    def log(self, text: str) -> None:
        """One line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now - START:9.4f}  {text}")

    def chance(self, probability: float) -> bool:
        """A seeded coin."""
        return probability > 0 and self.random.random() < probability


def brief(message: object) -> str:
    """A message on one line of a trace, without its long lists."""
    text = " ".join(repr(message).split())
    return text if len(text) < 170 else text[:167] + "..."
