"""`cost`: the pair, or the decode worker alone, that serves the request soonest (the default).

1. Every decode worker that may serve it, with every prefill worker that takes the prompt now; and by itself, where no
   prefill worker, busy ones included, would be quicker: the prompt is short, mostly cached, or the pool is behind.
2. Each is a number of milliseconds (router/placement/estimate.py): a cached prefix saves computing and pays for it in
   queueing, so a hot prefix is read again elsewhere as soon as that is quicker, and is cached there too (FAULTS P01).
3. Of those within NEAR_MS of the best one is drawn: routers that see the same do not all choose the same (FAULTS P03).
4. D gets the next best prefill workers as well, should the first one refuse.
"""

import random
from collections.abc import Mapping

from router.placement import estimate as reckon
from router.placement.eligible import Field, busy, candidates
from router.placement.estimate import Reading
from router.placement.types import Demand, Estimate, NoPair, Placement, Snapshot, Wait, WorkerLoad

NEAR_MS = 1.0

Option = tuple[Estimate, WorkerLoad, WorkerLoad | None]


class Cost:
    """Keeps nothing between requests."""

    def place(self, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
        """Choose by the steps above."""
        field = candidates(demand, snapshot)
        if not isinstance(field, Field):
            return field
        reads = {p.address: reckon.reading(p, demand) for workers in field.prefill.values() for p in workers}
        options = _options(field, reads)
        if not options:
            return busy(field)
        limit = min(option[0].total_ms for option in options) + NEAR_MS
        best, decode, prefill = rng.choice([option for option in options if option[0].total_ms <= limit])
        answer, ready = reckon.answer(decode, demand), decode.shape.among(field.ready)
        ranked = sorted(ready, key=lambda p: (p is not prefill, reckon.remote(reads[p.address], answer).total_ms))
        others = sorted((other for other, _, _ in options if other is not best), key=lambda other: other.total_ms)
        return field.served(best, decode, ranked, others)


def _options(field: Field, reads: Mapping[str, Reading]) -> list[Option]:
    """Every choice there is now. D by itself is one where no prefill worker, busy ones included, would be quicker."""
    demand = field.demand
    options: list[Option] = []
    for d in field.decode:
        answer = reckon.answer(d, demand)
        alone = reckon.local(reckon.local_reading(d, demand), answer)
        if field.alone(d):
            options.append((alone, d, None))
            continue
        ready = {p.address for p in d.shape.among(field.ready)}
        pairs = [(reckon.remote(reads[p.address], answer), d, p) for p in d.shape.among(field.prefill)]
        options += [pair for pair in pairs if pair[2].address in ready]
        if alone.total_ms <= min(pair[0].total_ms for pair in pairs):
            options.append((alone, d, None))
    return options
