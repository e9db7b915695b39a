"""Placement: which decode worker serves a request, and which prefill workers it should ask (DESIGN §4.4). Pure.

All in estimated milliseconds until the request streams at the pace of its neighbours:

    cost(d)     = first(d) + active(d) x step(d)
    first(d)    = local(d)                                   when d will prefill by itself
                = min over fitting p of prefill(p) + transfer(d)   otherwise
    local(d)    = (queued(d) + tokens - cached(d)) / rate(d)
    prefill(p)  = (queued(p) + tokens - cached(p)) / rate(p)
    transfer(d) = (tokens - cached(d)) x TRANSFER_MS_PER_TOKEN

`tokens` is the prompt and what was already emitted; `queued` and `active` are the worker's own Status plus what this
router booked since; each active sequence is taken to cost the new one a whole step over its life, which spreads
sequences over equal workers. A prefix hit saves prefill time and pays for it in queue time, so a hot prefix cannot pull
all traffic to one worker (FAULTS P01). Equal costs are drawn at random, so many routers do not choose alike (P03).

Decode must have room *now* (late binding). D prefills by itself when there is no prefill worker at all, when the
request demands it, or when at most `local_max_tokens` positions are to be computed; a prefill worker is in the list
only when protocol, layout and fingerprint are equal. A failing ("cooling") decode worker is chosen only when every
other is failing too (F13); one on which this request already failed only when no other has room. A prefill worker that
has just refused work ("cooling") gets none: who needs one then waits in the router, not in a decode worker's blocks.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.requests import worst_blocks

TRANSFER_MS_PER_TOKEN = 0.01  # 100 kB of KV per token at 10 GB/s; what counts is that moving is not free
DEFAULT_TOKENS_PER_S = 1000.0  # before the first measurement
DEFAULT_STEP_S = 0.01
MAX_PREFILL = 3  # D tries at most two; the third is for when one of them has just gone
MAX_CONSIDERED = 3  # pairs a Placement tells of


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be equal for two workers to exchange KV."""

    protocol: int
    layout: tuple[int, int, int, int, str]  # layers, kv heads, head dim, block size, dtype
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as placement sees it, for one request. Counts include this router's bookings not yet reported."""

    address: str
    name: str
    epoch: int
    shape: Shape
    max_context: int
    num_blocks: int
    cached_tokens: int = 0
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    active: int = 0
    step_s: float = 0.0
    room_blocks: int = 0
    cooling: bool = False

    @property
    def block_size(self) -> int:
        return self.shape.layout[3]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every worker that may get new work now."""

    decode: tuple[WorkerLoad, ...]
    prefill: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs. `histories`: ids already emitted, per sample that still runs."""

    prompt_tokens: int
    histories: tuple[int, ...]
    max_tokens: int
    local_max_tokens: int
    worst_case: bool = False
    force_local: bool = False
    fingerprint: bytes | None = None
    avoid: frozenset[int] = frozenset()  # epochs of workers where this request failed or was turned away

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + sum(self.histories)

    def worst_blocks(self, block_size: int) -> int:
        """The bound that the front door checked."""
        return worst_blocks(self.prompt_tokens, len(self.histories), self.max_tokens, block_size)

    def need_blocks(self, block_size: int) -> int:
        """Blocks wanted now: the KV there is, and one block per sample to grow into."""
        worst = self.worst_blocks(block_size)
        if self.worst_case:
            return worst
        held = _blocks(self.prompt_tokens, block_size) + sum(_blocks(h, block_size) + 1 for h in self.histories)
        return min(worst, held)


@dataclass(frozen=True, slots=True)
class Considered:
    """One pair that was compared, for people: names of the workers, and the terms of its cost, which is their sum.

    `prefill` is empty where decode would prefill by itself.
    """

    decode: str
    prefill: str
    terms_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `local`: D is expected to prefill by itself, even if `prefill` is not empty.

    `considered`: the chosen pair, then the next best ones, MAX_CONSIDERED in all.
    """

    decode: WorkerLoad
    prefill: tuple[WorkerLoad, ...]
    local: bool
    estimate_ms: float
    considered: tuple[Considered, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `best`: the decode worker nearest to having room. `hopeless`: no live worker could ever take it."""

    reason: str
    best: str | None = None
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class NoPair:
    """Workers are there, but no prefill worker fits a decode worker."""

    reason: str


def place(demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
    """Choose by the formula above. Changes nothing."""
    if not snapshot.decode:
        return Wait("no decode worker is ready", hopeless=True)
    paired = pairable(snapshot)
    if not paired:
        return NoPair(describe_mismatch(snapshot))
    able = [d for d in paired if _could_take(d, demand)]
    if not able:
        return Wait("no live decode worker is large enough or has the weights this request began with", hopeless=True)
    healthy = [d for d in able if not d.cooling] or able
    roomy = [d for d in healthy if d.room_blocks >= demand.need_blocks(d.block_size)]
    if not roomy:
        return Wait("decode workers are full", max(healthy, key=lambda d: d.room_blocks).address)
    fresh = [d for d in roomy if d.epoch not in demand.avoid] or roomy
    rng.shuffle(fresh)
    options = [option for d in fresh if (option := _option(d, demand, snapshot, rng)) is not None]
    if not options:
        return Wait("prefill workers are busy")
    options.sort(key=lambda option: option.estimate_ms)
    considered = tuple(pair for option in options[:MAX_CONSIDERED] for pair in option.considered)
    return replace(options[0], considered=considered)


def pairable(snapshot: Snapshot) -> list[WorkerLoad]:
    """Decode workers that fit a prefill worker; all of them when there is no prefill worker."""
    shapes = {p.shape for p in snapshot.prefill}
    return [d for d in snapshot.decode if not shapes or d.shape in shapes]


def describe_mismatch(snapshot: Snapshot) -> str:
    """Why the first decode worker fits no prefill worker, in words an operator can act on."""
    decode = snapshot.decode[0]
    parts = [
        f"prefill {p.name} and decode {decode.name} differ in {difference(p.shape, decode.shape)}"
        for p in snapshot.prefill
    ]
    return "; ".join(parts[:MAX_PREFILL])


def difference(a: Shape, b: Shape) -> str:
    """The first field in which two shapes differ, with both values."""
    if a.protocol != b.protocol:
        return f"protocol ({a.protocol} and {b.protocol})"
    if a.layout != b.layout:
        return f"layout ({a.layout} and {b.layout})"
    if a.fingerprint != b.fingerprint:
        return f"fingerprint ({a.fingerprint.hex()[:12]} and {b.fingerprint.hex()[:12]})"
    return "nothing"


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _could_take(decode: WorkerLoad, demand: Demand) -> bool:
    if demand.fingerprint is not None and decode.shape.fingerprint != demand.fingerprint:
        return False
    longest = demand.prompt_tokens + demand.max_tokens
    return longest <= decode.max_context and demand.worst_blocks(decode.block_size) <= decode.num_blocks


def _option(decode: WorkerLoad, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | None:
    """The request on this decode worker; None while every prefill worker it needs refuses work."""
    fitting = [
        p
        for p in snapshot.prefill
        if p.shape == decode.shape
        and demand.tokens <= p.max_context
        and _blocks(demand.tokens, p.block_size) <= p.num_blocks
    ]
    ranked = [] if demand.force_local else _rank(fitting, demand, rng)
    missing = max(1, demand.tokens - decode.cached_tokens)
    local = not ranked or missing <= demand.local_max_tokens
    if not local and ranked[0].cooling:
        return None
    terms = {"decode": decode.active * (decode.step_s or DEFAULT_STEP_S) * 1000}
    if local:
        terms["prefill"] = _compute_ms(decode, demand)
    else:
        terms["prefill"] = _compute_ms(ranked[0], demand)
        terms["transfer"] = missing * TRANSFER_MS_PER_TOKEN
    considered = Considered(decode.name, "" if local else ranked[0].name, terms)
    return Placement(decode, tuple(ranked[:MAX_PREFILL]), local, sum(terms.values()), (considered,))


def _rank(fitting: Sequence[WorkerLoad], demand: Demand, rng: random.Random) -> list[WorkerLoad]:
    shuffled = list(fitting)
    rng.shuffle(shuffled)
    return sorted(shuffled, key=lambda p: (p.cooling, p.epoch in demand.avoid, _compute_ms(p, demand)))


def _compute_ms(worker: WorkerLoad, demand: Demand) -> float:
    """Until this worker has computed what it lacks of the request, behind what it has queued."""
    missing = max(1, demand.tokens - worker.cached_tokens)
    return (worker.queued_tokens + missing) / (worker.tokens_per_s or DEFAULT_TOKENS_PER_S) * 1000
