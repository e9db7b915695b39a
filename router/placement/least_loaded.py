"""`least_loaded`: the prefill worker with the fewest positions to compute, the decode worker with the fewest streams.

Equal ones are drawn at random. Blind to prefixes, speeds and bandwidth. For comparison.
"""

import random
from collections.abc import Sequence

from router.placement.eligible import Field, candidates, in_order
from router.placement.types import Demand, NoPair, Placement, Snapshot, Wait, WorkerLoad


class LeastLoaded:
    """Keeps nothing between requests."""

    def place(self, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
        """The idlest of those that may serve it."""
        field = candidates(demand, snapshot)
        if not isinstance(field, Field):
            return field
        return in_order(field, idlest_decode(field.decode, rng), lambda ps: idlest_prefill(ps, rng))


def idlest_prefill(workers: Sequence[WorkerLoad], rng: random.Random) -> list[WorkerLoad]:
    """Fewest queued positions first."""
    return sorted(workers, key=lambda p: (p.queued_tokens, rng.random()))


def idlest_decode(workers: Sequence[WorkerLoad], rng: random.Random) -> list[WorkerLoad]:
    """Fewest sequences first."""
    return sorted(workers, key=lambda d: (d.active, rng.random()))
