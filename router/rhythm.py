"""How often a worker is heard, and from when on its silence says something (DESIGN §6). Pure.

A worker whose machine is overloaded, or that is told to beat less often than this router believes, is well at its own
pace: silence is what lasts for as many of the intervals that were observed as `suspect_s` has of `heartbeat_s` (six, by
default). The median of the last ones is what counts, so neither one long gap nor the beat that a change of state brings
early says anything about the rest, and a worker at its ordinary pace is found out as soon as `suspect_s` says. Nobody
talks himself immortal: there is a bound.
"""

from collections import deque

LONGEST = 3.0  # times suspect_s
_KEPT = 7
_ENOUGH = 3  # before that nothing is known


class Rhythm:
    """The beats of one life of a worker, due every `heartbeat_s`. Times are the router's monotonic seconds.

    The time in which its watch was away is an interval as well: who beats more slowly than a router waits loses its
    watch each time, and is known for it after three.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=_KEPT)
        self._usual = 0.0

    def of_another_life(self) -> "Rhythm":
        """Nothing is known of the worker that answers there now."""
        return Rhythm(self._heartbeat_s)

    def beat(self, now: float) -> None:
        """It was heard."""
        if self._last is not None:
            self._intervals.append(now - self._last)
            if len(self._intervals) >= _ENOUGH:
                self._usual = sorted(self._intervals)[len(self._intervals) // 2]
        self._last = now

    def forgive(self, gap_s: float, now: float) -> None:
        """This process slept for `gap_s` until now."""
        if self._last is not None:
            self._last = min(now, self._last + gap_s)

    def patience_s(self, suspect_s: float) -> float:
        """How long it may be silent."""
        return suspect_s * min(LONGEST, max(1.0, self._usual / self._heartbeat_s))
