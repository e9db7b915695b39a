"""How fast this worker is, learnt from its own steps: what routers place by (DESIGN §4.4). Pure.

Reading: positions per second by *depth*, the position in its sequence that is computed; a position deeper in a prompt
attends to more and costs more, so a prompt's time is the sum over the depths it passes, wherever a prefix hit lets it
start. Decoding: seconds of a step by batch and by the KV that the step reads. Both are averages that forget, in cells
whose bounds double. In a step that does both, what decoding alone would have taken belongs to it, the rest is reading.
"""

from collections.abc import Iterable
from dataclasses import dataclass

KEEP = 0.8  # of a cell's past, at each step that falls into it
FIRST_DEPTH = 512  # bound of the first cell; each next one is twice as deep
MOST_REPORTED = 32  # prompts that a status lists one by one


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes. `reads`: (first position, how many) per prompt; `context`: positions of all streams."""

    reads: tuple[tuple[int, int], ...]
    batch: int
    context: int


@dataclass(slots=True)
class _Sum:
    """Weighted sums of one cell."""

    weight: float = 0.0
    seconds: float = 0.0
    batch: float = 0.0
    context: float = 0.0

    def add(self, weight: float, seconds: float, batch: float = 0.0, context: float = 0.0) -> None:
        self.weight = KEEP * self.weight + weight
        self.seconds = KEEP * self.seconds + seconds
        self.batch = KEEP * self.batch + batch
        self.context = KEEP * self.context + context


class StepRates:
    """Averages over the steps of one engine."""

    def __init__(self) -> None:
        self._reading: dict[int, _Sum] = {}  # depth bound -> positions and seconds
        self._decoding: dict[tuple[int, int], _Sum] = {}  # powers of two of batch and context -> steps and seconds

    def done(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took so long."""
        if not work.reads:
            if work.batch:
                cell = (work.batch.bit_length(), work.context.bit_length())
                self._decoding.setdefault(cell, _Sum()).add(1, seconds, work.batch, work.context)
            return
        if work.batch:
            alone = self._step_s(work)
            if alone is None:
                return
            seconds = max(seconds - alone, seconds / 10)  # never nothing: reading was most of such a step
        total = sum(count for _, count in work.reads)
        for start, count in work.reads:
            bound = depth_bound(start + count // 2)
            self._reading.setdefault(bound, _Sum()).add(count, seconds * count / total)

    def prefill(self) -> list[tuple[int, float]]:
        """(depth bound, positions per second), ascending; empty before the first measurement."""
        return [(bound, cell.weight / max(cell.seconds, 1e-9)) for bound, cell in sorted(self._reading.items())]

    def steps(self) -> list[tuple[int, int, float]]:
        """(batch, context, seconds) of what was measured; empty before the first measurement."""
        cells = [cell for _, cell in sorted(self._decoding.items())]
        return [(round(c.batch / c.weight), round(c.context / c.weight), c.seconds / c.weight) for c in cells]

    def _step_s(self, work: Work) -> float | None:
        """What decoding alone takes, from the nearest cell; None when none was measured."""
        where = (work.batch.bit_length(), work.context.bit_length())
        near = min(self._decoding, key=lambda c: (abs(c[0] - where[0]) + abs(c[1] - where[1]), c), default=None)
        return None if near is None else self._decoding[near].seconds / self._decoding[near].weight


def depth_bound(position: int) -> int:
    """The bound of the cell that `position` lies in: FIRST_DEPTH doubled until it is greater."""
    bound = FIRST_DEPTH
    while bound <= position:
        bound *= 2
    return bound


def report_queue(remaining: Iterable[int]) -> list[int]:
    """Positions still to be computed, by prompt, shortest first; of very many the longest are one entry."""
    queue = sorted(each for each in remaining if each > 0)
    if len(queue) <= MOST_REPORTED:
        return queue
    return [*queue[: MOST_REPORTED - 1], sum(queue[MOST_REPORTED - 1 :])]
