"""One request as its client saw it, and the times that are read off it. Pure; seconds on the client's clock.

TTFT  sent -> first chunk with text          TTST  sent -> second chunk with text
ITL   each gap between consecutive chunks    TPOT  (last chunk - first chunk) / (output tokens - 1)
E2E   sent -> last chunk
A chunk is one token unless the server joined several (`chunks_per_token` in figures.py shows it).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the router told of one request's hand-off. Times in seconds, on the decode worker's clock.

    `wire` and `verify` add up over the reads of one hand-off, which overlap each other and prefill; `exposed` is what
    overlap did not hide: the last offer -> ready to decode.
    """

    kv_bytes: int
    offer_wait: float
    wire: float
    verify: float
    exposed: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. `chunks`: when each chunk with text came; `ended`: its last byte. `error`: None when complete."""

    kind: str
    sent: float
    chunks: tuple[float, ...]
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    handoff: Handoff | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    status: int = 0
    ended: float = 0.0
    retry_after: float | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.chunks)

    @property
    def ttft(self) -> float:
        """Raises IndexError for a request without a token."""
        return self.chunks[0] - self.sent

    @property
    def ttst(self) -> float | None:
        """None when there was no second chunk."""
        return self.chunks[1] - self.sent if len(self.chunks) > 1 else None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(start, end) of each gap between consecutive chunks."""
        return list(zip(self.chunks, self.chunks[1:], strict=False))

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.chunks[-1] - self.sent

    def prompt_window(self) -> tuple[float, float]:
        """While its prompt is read and handed off: from sending to the second chunk (the first when it is the last)."""
        return self.sent, self.chunks[min(1, len(self.chunks) - 1)]

    def transfer_window(self) -> tuple[float, float] | None:
        """About when its KV moved: first offer -> ready to decode, placed on our clock by the first token."""
        if self.handoff is None:
            return None
        first = self.chunks[0]
        start = first - max(0.0, self.handoff.prefill - self.handoff.offer_wait)
        return start, first + self.handoff.exposed


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps. Seconds."""

    ttft: float = 2.0
    tpot: float = 0.080

    def kept(self, timeline: Timeline) -> bool:
        """Failed requests keep nothing; one token has no TPOT."""
        return timeline.ok and timeline.ttft <= self.ttft and (timeline.tpot or 0.0) <= self.tpot


def percentile(values: Sequence[float], percent: float) -> float | None:
    """With linear interpolation between the two neighbours; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / PERCENT
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def split_gaps(
    timelines: Sequence[Timeline], windows: Iterable[tuple[Timeline, tuple[float, float]]]
) -> tuple[list[float], list[float]]:
    """ITLs of `timelines` that overlap a window of *another* request, and those that overlap none."""
    spans = sorted(((start, end, owner) for owner, (start, end) in windows), key=lambda span: span[0])
    during: list[float] = []
    quiet: list[float] = []
    for timeline in timelines:
        others = [(start, end) for start, end, owner in spans if owner is not timeline]
        for start, end in timeline.gaps:
            touched = any(begin < end and start < finish for begin, finish in others)
            (during if touched else quiet).append(end - start)
    return during, quiet
