"""The last minutes, in slots of a few seconds: sums and histograms that forget by themselves. Pure; `now` is seconds.

A ring of slots, each of a fixed size, so memory never grows. To add is to look up the slot and to increment: cheap
enough for every token. Slots in which nothing happened are as empty as those that were never used.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence


def spread(least: float, most: float, ratio: float) -> tuple[float, ...]:
    """Bucket bounds from `least` to at least `most`, each `ratio` times the one before."""
    steps = math.ceil(math.log(most / least) / math.log(ratio) - 1e-9)
    return tuple(least * ratio**step for step in range(steps + 1))


LATENCY_S = spread(0.0005, 120.0, 1.25)
"""Bounds for times that people feel: a quantile is right to about a tenth."""


class Ring:
    """`slots` rows of `width` numbers, each for `slot_s` seconds; a row is emptied when its turn comes again."""

    def __init__(self, width: int, slot_s: float, slots: int) -> None:
        self.slot_s = slot_s
        self.slots = slots
        self._width = width
        self._rows = [[0.0] * width for _ in range(slots)]
        self._slot: int | None = None  # the newest, counted from time 0
        self.present = self._rows[0]
        self.until = -math.inf  # the end of the present slot

    def row(self, now: float) -> list[float]:
        """The present slot's numbers. Time that goes back a little stays in the newest slot."""
        if now >= self.until:
            self._advance(int(now // self.slot_s))
        return self.present

    def rows(self, now: float) -> list[list[float]]:
        """A copy of all slots, the oldest first; the last one is the present slot, which is not over."""
        self.row(now)
        newest = self._slot or 0
        return [list(self._rows[slot % self.slots]) for slot in range(newest - self.slots + 1, newest + 1)]

    def _advance(self, slot: int) -> None:
        known = slot if self._slot is None else self._slot
        for passed in range(max(known + 1, slot - self.slots + 1), slot + 1):
            self._rows[passed % self.slots] = [0.0] * self._width
        self._slot = max(known, slot)
        self.present = self._rows[self._slot % self.slots]
        self.until = (self._slot + 1) * self.slot_s


class RollingSums:
    """Sums of several things at once, over the last `slots` x `slot_s` seconds."""

    def __init__(self, width: int, slot_s: float, slots: int) -> None:
        self._ring = Ring(width, slot_s, slots)

    def add(self, now: float, *values: float) -> None:
        """One value for each thing."""
        row = self._ring.row(now)
        for at, value in enumerate(values):
            row[at] += value

    def series(self, now: float) -> list[list[float]]:
        """The sums of each slot, the oldest first."""
        return self._ring.rows(now)

    def totals(self, now: float) -> list[float]:
        """The sums over all slots."""
        return [math.fsum(column) for column in zip(*self._ring.rows(now), strict=True)]


class RollingHistogram:
    """Values by bucket over the last `slots` x `slot_s` seconds. `bounds` are upper ends, rising."""

    def __init__(self, bounds: Sequence[float], slot_s: float, slots: int) -> None:
        self._bounds = tuple(bounds)
        self._ring = Ring(len(self._bounds) + 1, slot_s, slots)

    def add(self, now: float, value: float) -> None:
        ring = self._ring
        row = ring.present if now < ring.until else ring.row(now)  # a call less, for every token
        row[bisect_left(self._bounds, value)] += 1

    def counts(self, now: float) -> list[int]:
        """How many values came in each slot, the oldest first."""
        return [int(sum(row)) for row in self._ring.rows(now)]

    def quantiles(self, now: float, shares: Sequence[float]) -> tuple[list[list[float | None]], list[float | None]]:
        """For each share (0..1) its value in each slot, and over all of them; None where nothing came."""
        rows = self._ring.rows(now)
        together = [sum(column) for column in zip(*rows, strict=True)]
        each = [[self._quantile(row, share) for row in rows] for share in shares]
        return each, [self._quantile(together, share) for share in shares]

    def _quantile(self, row: Sequence[float], share: float) -> float | None:
        """Within its bucket values are taken to be spread evenly; beyond the last bound it is that bound."""
        total = sum(row)
        if not total:
            return None
        rank, below = share * total, 0.0
        for at, count in enumerate(row[:-1]):
            if count and below + count >= rank:
                low = self._bounds[at - 1] if at else 0.0
                return low + (self._bounds[at] - low) * max(0.0, rank - below) / count
            below += count
        return self._bounds[-1]
