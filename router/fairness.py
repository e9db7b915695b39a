"""Virtual token counters: who is served next among flows that share one server, in proportion to their weights. Pure.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every flow has a counter of the work it has
been given, divided by its weight, and the one with the lowest counter goes next.

1. *Arrive.* A flow that had nothing waiting is lifted to the lowest counter among those that wait, or to that of the
   flow served last when none does: time in which it asked for nothing is no credit.
2. *Charge.* Work given counts at once, with the answer's expected length, and is corrected by what it came to.

Two flows that both always have something waiting get work in proportion to their weights, up to about one request of
each: no flow starves, whatever the others send. An unused share goes to whoever waits.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

OUTPUT_WEIGHT = 2.0
"""Work of a written token; that of a read one is 1 (the paper's own ratio)."""

_LENGTHS = (256, 1024, 4096, 16_384)

Flow = TypeVar("Flow", bound=Hashable)


def work_of(prompt_tokens: int, output_tokens: float) -> float:
    """The work of a request: tokens read, and tokens written by their weight."""
    return prompt_tokens + OUTPUT_WEIGHT * output_tokens


def length_class(prompt_tokens: int) -> int:
    """0 for the shortest prompts to 4 for those of more than 16,384 tokens: prompts of a class wait in one line."""
    return bisect_left(_LENGTHS, prompt_tokens)


class Counters(Generic[Flow]):
    """The counters of the flows seen so far. `weights` of flows that are not named are 1."""

    def __init__(self, weights: Mapping[Flow, float] | None = None) -> None:
        self._weights: Mapping[Flow, float] = {} if weights is None else weights
        self._counters: dict[Flow, float] = {}
        self._last: Flow | None = None

    def __getitem__(self, flow: Flow) -> float:
        return self._counters.get(flow, 0.0)

    def weight(self, flow: Flow) -> float:
        return self._weights.get(flow, 1.0)

    def arrive(self, flow: Flow, waiting: Iterable[Flow]) -> None:
        """Something of `flow`, which had nothing waiting, waits now; `waiting`: the flows that do already."""
        self._counters[flow] = self._lifted(flow, waiting)

    def serve(self, flow: Flow, work: float) -> None:
        """`flow` has been chosen, and is given this work."""
        self._last = flow
        self.charge(flow, work)

    def charge(self, flow: Flow, work: float) -> None:
        """It came to more than was charged, or to less."""
        self._counters[flow] = self[flow] + work / self.weight(flow)

    def ahead(self, flow: Flow, own: float, others: Mapping[Flow, float], *, idle: bool) -> float:
        """Work that is given before the end of `own` work of `flow`: its own, and what of the others' goes before.

        `others`: what waits of each other flow. Until `flow` has been given its own work its counter rises by
        own / weight, from where it is, or is lifted to when it is `idle`; up to there the others are served.
        """
        start = self._lifted(flow, others) if idle else self[flow]
        end = start + own / self.weight(flow)
        before = (min(work, max(0.0, end - self[other]) * self.weight(other)) for other, work in others.items())
        return own + sum(before)

    def _lifted(self, flow: Flow, waiting: Iterable[Flow]) -> float:
        floors = [self[other] for other in waiting]
        if not floors and self._last is not None:
            floors = [self[self._last]]
        return max(self[flow], min(floors, default=0.0))
