"""How long something took each time, counted in cells: enough for any quantile, and cheap at every step. Pure."""

from bisect import bisect_left

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)


class Durations:
    """`counts[i]` durations were at most `BOUNDS_S[i]`, but more than the bound before it; the last count is the rest."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
