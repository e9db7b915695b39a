"""What users felt over the last five minutes, in slots of five seconds: for the dashboard, which draws it.

Prometheus has the same, and for longer; this needs nobody to have been asking. A token costs one increment.
"""

from router.windows import LATENCY_S, RollingHistogram, RollingSums

SLOT_S, SLOTS = 5.0, 60


class Recent:
    """Filled by every Call; `now` is the router's monotonic clock."""

    def __init__(self) -> None:
        self.ttft = RollingHistogram(LATENCY_S, SLOT_S, SLOTS)
        self.itl = RollingHistogram(LATENCY_S, SLOT_S, SLOTS)
        self._tokens = RollingSums(3, SLOT_S, SLOTS)
        self._ended = RollingSums(2, SLOT_S, SLOTS)

    def used(self, now: float, prompt: int, cached: int, written: int) -> None:
        """The tokens of a request that has ended."""
        self._tokens.add(now, prompt, cached, written)

    def ended(self, now: float, *, good: bool) -> None:
        """One request's outcome. `good`: as far as this cluster can tell."""
        self._ended.add(now, 1, 0 if good else 1)

    def tokens(self, now: float) -> tuple[int, int, int]:
        """Prompt, cached and written tokens of requests that ended lately."""
        prompt, cached, written = self._tokens.totals(now)
        return int(prompt), int(cached), int(written)

    def outcomes(self, now: float) -> tuple[int, int]:
        """Requests that ended lately, and how many of them badly."""
        ended, bad = self._ended.totals(now)
        return int(ended), int(bad)
