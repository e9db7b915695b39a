"""What placement looks at and what it answers: plain, immutable values."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from cluster.core.kv_dtypes import ITEM_BYTES, SCALE_BYTES
from router.placement.rates import Rates
from router.requests import worst_blocks

UNMEASURED = Rates()
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be equal for two workers to exchange KV, but that a decode worker may convert.

    `sources`: the (dtype, fingerprint) of KV that it converts to its own.
    """

    protocol: int
    layout: tuple[int, int, int, int, str]  # layers, kv heads, head dim, block size, dtype
    fingerprint: bytes
    sources: tuple[tuple[str, bytes], ...] = ()

    @property
    def kv_bytes(self) -> int:
        """KV of one position."""
        layers, heads, dim, _, dtype = self.layout
        return 2 * layers * heads * (dim * ITEM_BYTES.get(dtype, 2) + SCALE_BYTES.get(dtype, 0))

    @property
    def moved_bytes(self) -> int:
        """KV of one position as it comes to a decode worker of this shape."""
        return max(shape.kv_bytes for shape in self.readable)

    @property
    def readable(self) -> tuple["Shape", ...]:
        """The shapes of the prefill workers whose KV a decode worker of this shape can take."""
        if not self.sources:
            return (self,)
        own, shape = replace(self, sources=()), self.layout[:4]
        return (own, *(Shape(self.protocol, (*shape, dtype), mark) for dtype, mark in self.sources))

    def among(self, prefill: Mapping["Shape", tuple[_Value, ...]]) -> tuple[_Value, ...]:
        """Those that a decode worker of this shape can take KV from."""
        if not self.sources:
            return prefill.get(self, ())
        return tuple(each for shape in self.readable for each in prefill.get(shape, ()))


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as placement sees it, for one request. Counts include this router's bookings not yet reported.

    `queue`: positions still to be computed, by prompt. `context`: KV positions of all its streams. `window_tokens`:
    with anything queued a prefill worker takes no more than this; 0: no such limit.
    """

    address: str
    name: str
    epoch: int
    shape: Shape
    max_context: int
    num_blocks: int
    rates: Rates = UNMEASURED
    cached_tokens: int = 0
    queue: tuple[int, ...] = ()
    window_tokens: int = 0
    active: int = 0
    context: int = 0
    room_blocks: int = 0
    cooling: bool = False

    @property
    def block_size(self) -> int:
        return self.shape.layout[3]

    @property
    def queued_tokens(self) -> int:
        return sum(self.queue)

    def missing(self, tokens: int) -> int:
        """Positions of a prompt of `tokens` that this worker would have to compute: at least the last one."""
        return max(1, tokens - self.cached_tokens)

    def open_to(self, tokens: int) -> bool:
        """Whether a prefill worker would take a prompt now (DESIGN §4.6)."""
        fits = not self.queue or not self.window_tokens or sum(self.queue) + self.missing(tokens) <= self.window_tokens
        return fits and not self.cooling


class Snapshot(NamedTuple):
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
        held = -(-self.prompt_tokens // block_size) + sum(-(-h // block_size) + 1 for h in self.histories)
        return min(worst, held)


class Considered(NamedTuple):
    """One pair that was compared, for people: names of the workers, and the terms of its cost, which is their sum.

    `prefill` is empty where decode would prefill by itself.
    """

    decode: str
    prefill: str
    terms_ms: Mapping[str, float]


class Estimate(NamedTuple):
    """Milliseconds that one choice should take, by part. `prefill` empty: the decode worker reads the prompt."""

    decode: str
    prefill: str
    queue_ms: float
    compute_ms: float
    transfer_ms: float
    decode_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.decode_ms

    def told(self) -> Considered:
        """For people."""
        terms = {"queue": self.queue_ms, "compute": self.compute_ms, "transfer": self.transfer_ms}
        if not self.prefill:
            del terms["transfer"]
        return Considered(self.decode, self.prefill, {**terms, "decode": self.decode_ms})


class Placement(NamedTuple):
    """Where a request goes. `local`: D is expected to prefill by itself, even if `prefill` is not empty.

    `local_max_tokens`: what D is told; with at most so many positions to compute it does prefill by itself.
    `considered`: the chosen pair, then the next best ones where the policy compares any, MAX_CONSIDERED in all.
    """

    decode: WorkerLoad
    prefill: tuple[WorkerLoad, ...]
    local: bool
    local_max_tokens: int
    estimate_ms: float
    considered: tuple[Considered, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `best`: the worker nearest to having room, prefill or decode. `hopeless`: no live worker could ever take
    it."""

    reason: str
    best: str | None = None
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class NoPair:
    """Workers are there, but no prefill worker fits a decode worker."""

    reason: str


class Policy(Protocol):
    """Chooses workers for one request at a time. Changes nothing but its own memory, if it has any."""

    def place(self, demand: Demand, snapshot: Snapshot, rng: random.Random) -> Placement | Wait | NoPair:
        """A placement; or why there is none now, or can be none."""


def difference(a: Shape, b: Shape) -> str:
    """The first field in which a prefill worker's shape `a` and a decode worker's `b` differ, with both values."""
    b = next((shape for shape in b.readable if shape.layout == a.layout), b)
    if a.protocol != b.protocol:
        return f"protocol ({a.protocol} and {b.protocol})"
    if a.layout != b.layout:
        return f"layout ({a.layout} and {b.layout})"
    if a.fingerprint != b.fingerprint:
        return f"fingerprint ({a.fingerprint.hex()[:12]} and {b.fingerprint.hex()[:12]})"
    return "nothing"
