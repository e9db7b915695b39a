"""What workers measured of themselves, and what it says of work they have not done yet. Pure; milliseconds.

Every worker reports positions per second by depth in a prompt; a decode worker also seconds per step by batch and
context, and GB/s per link (engine/rates.py, decode_worker/peers.py). What was not measured is taken from the nearest
thing that was: a depth from the nearest depth; a step from the nearest (batch, context), carried to the one in question
along `_shape`. Before any measurement the defaults hold; they are the same for every worker, so that queues decide.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.stubs.watch_pb2 import Rates as RatesMessage

DEFAULT_TOKENS_PER_S = 1000.0
DEFAULT_STEP_MS = 10.0
DEFAULT_GB_PER_S = 10.0
DEFAULT_CHUNK = 256
LEAST, MOST = 1e-9, 1e12  # of any measurement, in its unit: what is beyond was not measured
# A step reads weights once and each stream's KV: it has doubled at so many streams, or so much KV.
DOUBLE_BATCH = 32.0
DOUBLE_CONTEXT = 262_144.0


@dataclass(frozen=True, slots=True)
class StepCell:
    """A measured decode step."""

    batch: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    """One worker's measurements. `prefill`: (depth bound, positions per second), ascending; `links`: GB/s by epoch."""

    prefill: tuple[tuple[int, float], ...] = ()
    steps: tuple[StepCell, ...] = ()
    links: Mapping[int, float] = field(default_factory=dict)
    chunk_tokens: int = DEFAULT_CHUNK
    local_chunk_tokens: int = DEFAULT_CHUNK
    tokens_per_s: float = field(init=False)  # over all depths measured, each counting alike

    def __post_init__(self) -> None:
        mean = len(self.prefill) / sum(1 / rate for _, rate in self.prefill) if self.prefill else DEFAULT_TOKENS_PER_S
        object.__setattr__(self, "tokens_per_s", mean)

    def compute_ms(self, start: int, end: int) -> float:
        """To compute positions [start, end) of a prompt, alone and without waiting."""
        if not self.prefill:
            return (end - start) / DEFAULT_TOKENS_PER_S * 1000
        total, at = 0.0, start
        for bound, rate in self.prefill[:-1]:
            if at >= end:
                break
            until = min(bound, end)
            if until > at:
                total += (until - at) / rate
                at = until
        if at < end:
            total += (end - at) / self.prefill[-1][1]
        return total * 1000

    def step_ms(self, batch: int, context: int) -> float:
        """One decode step of `batch` streams that hold `context` positions together."""
        if not self.steps:
            return DEFAULT_STEP_MS * _shape(batch, context)
        batch_size, context_size = batch.bit_length(), context.bit_length()
        near, least = self.steps[0], 1 << 30
        for cell in self.steps:
            distance = abs(cell.batch.bit_length() - batch_size) + abs(cell.context.bit_length() - context_size)
            if distance < least:
                near, least = cell, distance
        return near.ms * _shape(batch, context) / _shape(near.batch, near.context)

    def gb_per_s(self, epoch: int) -> float:
        """What reads from this prefill worker reach."""
        return self.links.get(epoch, 0.0) or DEFAULT_GB_PER_S


def read_rates(message: RatesMessage) -> Rates:
    """From a Status; entries that say nothing, or nothing that can be, are left out."""
    chunk = message.chunk_tokens if message.chunk_tokens > 0 else DEFAULT_CHUNK
    steps = (s for s in message.steps if _can_be(s.seconds) and s.batch >= 0 and s.context_tokens >= 0)
    return Rates(
        prefill=tuple((r.depth, r.tokens_per_s) for r in message.prefill if _can_be(r.tokens_per_s)),
        steps=tuple(StepCell(s.batch, s.context_tokens, s.seconds * 1000) for s in steps),
        links={link.epoch: link.gb_per_s for link in message.links if _can_be(link.gb_per_s)},
        chunk_tokens=chunk,
        local_chunk_tokens=message.local_chunk_tokens if message.local_chunk_tokens > 0 else chunk,
    )


def _can_be(measured: float) -> bool:
    """Not of NaN, nor of what a sum or a quotient would make infinite or 0."""
    return LEAST <= measured <= MOST


def _shape(batch: int, context: int) -> float:
    return 1 + batch / DOUBLE_BATCH + context / DOUBLE_CONTEXT
