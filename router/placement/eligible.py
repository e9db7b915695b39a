"""Who may serve a request at all: the same rules for every policy. Pure.

1. *Shape.* KV moves only between equal shapes, or to a decode worker that converts it. A decode worker that fits no
   prefill worker gets nothing, unless there is no prefill worker at all; a stream goes on only with the weights it
   began with.
2. *Size.* What could never hold the request is left out; when that is everybody, waiting is hopeless.
3. *Cooling.* A failing decode worker is chosen only when every other is failing too (FAULTS F13).
4. *Room.* Decode must have room now (late binding). A prefill worker must take the prompt now: neither refusing work
   nor beyond its admission window; while none would, the request waits in the router, not in a decode worker's blocks.
   Either way it is told who is nearest to having room: that worker can be kept free for it (router/dispatcher.py).
5. *Avoided.* A worker on which this request already failed, or that turned it away, only when there is no other.
6. *Who reads the prompt.* D by itself when no prefill worker fits, when the request demands it, or with at most
   `local_max_tokens` positions to compute; otherwise as the policy says.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from router.placement.estimate import estimate
from router.placement.types import Demand, Estimate, NoPair, Placement, Shape, Snapshot, Wait, WorkerLoad, difference

MAX_PREFILL = 3  # D tries at most two; the third is for when one of them has just gone
MAX_CONSIDERED = 3  # pairs a Placement tells of


class HasShape(Protocol):
    """What is known of a worker, loads or facts alone."""

    @property
    def shape(self) -> Shape: ...


Shaped = TypeVar("Shaped", bound=HasShape)


class Field(NamedTuple):
    """The candidates. `prefill`: those that could hold the prompt, by shape; `ready`: those that take it now."""

    demand: Demand
    decode: tuple[WorkerLoad, ...]
    prefill: dict[Shape, tuple[WorkerLoad, ...]]
    ready: dict[Shape, tuple[WorkerLoad, ...]]

    def alone(self, decode: WorkerLoad) -> bool:
        """Whether this decode worker must read the prompt by itself."""
        few = decode.missing(self.demand.tokens) <= self.demand.local_max_tokens
        return few or not decode.shape.among(self.prefill)

    def served(
        self, chosen: Estimate, decode: WorkerLoad, ranked: Sequence[WorkerLoad], others: Sequence[Estimate] = ()
    ) -> Placement:
        """The placement on `decode`, with the prefill workers it may ask, in this order. `others`: next best first.

        When D is to read by itself, prefill workers are for the case that it has lost the prefix meanwhile.
        """
        local = not chosen.prefill
        most = max(self.demand.local_max_tokens, decode.missing(self.demand.tokens) if local else 0)
        considered = tuple(estimate.told() for estimate in (chosen, *others)[:MAX_CONSIDERED])
        return Placement(decode, tuple(ranked[:MAX_PREFILL]), local, most, chosen.total_ms, considered)


def candidates(demand: Demand, snapshot: Snapshot) -> Field | Wait | NoPair:
    """Apply the rules above."""
    if not snapshot.decode:
        return Wait("no decode worker is ready", hopeless=True)
    paired = pairable(snapshot.decode, snapshot.prefill)
    if not paired:
        return NoPair(describe_mismatch(snapshot))
    able = [d for d in paired if _could_take(d, demand)]
    if not able:
        return Wait("no live decode worker is large enough or has the weights this request began with", hopeless=True)
    healthy = [d for d in able if not d.cooling] or able
    roomy = [d for d in healthy if d.room_blocks >= demand.need_blocks(d.block_size)]
    if not roomy:
        return Wait("decode workers are full", max(healthy, key=lambda d: d.room_blocks).address)
    decode = [d for d in roomy if d.epoch not in demand.avoid] or roomy
    prefill = {} if demand.force_local else _fitting(demand, snapshot)
    return Field(demand, tuple(decode), prefill, {s: _ready(demand, workers) for s, workers in prefill.items()})


def in_order(
    field: Field, decode: Sequence[WorkerLoad], rank: Callable[[Sequence[WorkerLoad]], list[WorkerLoad]]
) -> Placement | Wait:
    """For policies that choose one side after the other: the first of `decode` that can be served now."""
    for worker in decode:
        alone, ranked = field.alone(worker), rank(worker.shape.among(field.ready))
        if alone or ranked:
            prefill = None if alone else ranked[0]
            return field.served(estimate(worker, prefill, field.demand), worker, ranked)
    return busy(field)


def busy(field: Field) -> Wait:
    """Every decode worker wants a prefill worker, and none takes the prompt now."""
    fitting = {p.address: p for shape in {d.shape for d in field.decode} for p in shape.among(field.prefill)}
    ahead = {
        address: (p.cooling, p.queued_tokens + p.missing(field.demand.tokens), address)
        for address, p in fitting.items()
    }
    return Wait("prefill workers are busy", min(ahead, key=ahead.__getitem__))


def pairable(decode: Iterable[Shaped], prefill: Iterable[HasShape]) -> list[Shaped]:
    """Decode workers that fit a prefill worker; all of them when there is no prefill worker."""
    shapes = {p.shape for p in prefill}
    return [d for d in decode if not shapes or not shapes.isdisjoint(d.shape.readable)]


def describe_mismatch(snapshot: Snapshot) -> str:
    """Why the first decode worker fits no prefill worker, in words an operator can act on."""
    decode = snapshot.decode[0]
    parts = [
        f"prefill {p.name} and decode {decode.name} differ in {difference(p.shape, decode.shape)}"
        for p in snapshot.prefill
    ]
    return "; ".join(parts[:MAX_PREFILL])


def _could_take(decode: WorkerLoad, demand: Demand) -> bool:
    if demand.fingerprint is not None and decode.shape.fingerprint != demand.fingerprint:
        return False
    longest = demand.prompt_tokens + demand.max_tokens
    return longest <= decode.max_context and demand.worst_blocks(decode.block_size) <= decode.num_blocks


def _fitting(demand: Demand, snapshot: Snapshot) -> dict[Shape, tuple[WorkerLoad, ...]]:
    fitting: dict[Shape, tuple[WorkerLoad, ...]] = {}
    for p in snapshot.prefill:
        if demand.tokens <= p.max_context and -(-demand.tokens // p.block_size) <= p.num_blocks:
            fitting[p.shape] = (*fitting.get(p.shape, ()), p)
    return fitting


def _ready(demand: Demand, workers: Sequence[WorkerLoad]) -> tuple[WorkerLoad, ...]:
    ready = [p for p in workers if p.open_to(demand.tokens)]
    return tuple([p for p in ready if p.epoch not in demand.avoid] or ready)
