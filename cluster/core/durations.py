"""How long something took each time, counted in cells: enough for any quantile, and cheap at every step. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


class Durations:
    """`counts[i]` were at most `bounds[i]` seconds, and more than the bound before it; the last count is the rest."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds
