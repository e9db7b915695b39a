"""`round_robin`: everybody in turn, prefill and decode workers each by themselves. For comparison.

Whose turn it is follows from the address used last, so workers may come and go.
"""

import random
from collections.abc import Sequence

from router.placement.eligible import Field, candidates, in_order
from router.placement.types import Demand, NoPair, Placement, Snapshot, Wait, WorkerLoad


class RoundRobin:
    """Remembers who was last."""

    def __init__(self) -> None:
        self._last_prefill = ""
        self._last_decode = ""

    def place(self, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
        """The next in turn of those that may serve it."""
        field = candidates(demand, snapshot)
        if not isinstance(field, Field):
            return field
        decode = _turn(field.decode, self._last_decode)
        placed = in_order(field, decode, lambda ps: _turn(ps, self._last_prefill))
        if isinstance(placed, Placement):
            self._last_decode = placed.decode.address
            if not placed.local:
                self._last_prefill = placed.prefill[0].address
        return placed


def _turn(workers: Sequence[WorkerLoad], last: str) -> list[WorkerLoad]:
    return sorted(workers, key=lambda worker: (worker.address <= last, worker.address))
