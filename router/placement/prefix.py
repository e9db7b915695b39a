"""`prefix`: the worker that holds most of the prompt, if it holds at least MATCH of it; else the least loaded one.

The rule that other routers call cache-aware. It knows no price of waiting: a prefix that is hot enough makes its worker
slow while others idle (FAULTS P01). For comparison.
"""

import random
from collections.abc import Sequence

from router.placement.eligible import Field, candidates, in_order
from router.placement.least_loaded import idlest_decode, idlest_prefill
from router.placement.types import Demand, NoPair, Placement, Snapshot, Wait, WorkerLoad

MATCH = 0.5


class Prefix:
    """Keeps nothing between requests."""

    def place(self, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
        """The longest match of those that may serve it."""
        field = candidates(demand, snapshot)
        if not isinstance(field, Field):
            return field
        decode_order = _longest(idlest_decode(field.decode, rng), demand)
        return in_order(field, decode_order, lambda ps: _longest(idlest_prefill(ps, rng), demand))


def _longest(workers: Sequence[WorkerLoad], demand: Demand) -> list[WorkerLoad]:
    """The long matches first, longest first; then the rest as it stands."""
    enough = MATCH * demand.tokens
    return sorted(workers, key=lambda worker: -worker.cached_tokens if worker.cached_tokens >= enough else 0)
