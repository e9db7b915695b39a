"""Every request of a run, small enough to be kept in its result: what plots and later questions are drawn from. Pure.

In JSON: {"kind", "sent_ms" since the run's start, "prompt_tokens", "ok", "gaps"}. `gaps` is text: numbers in tenths of
a millisecond, the first from sending to the first chunk with text, each other one from the chunk before (0.1 ms is
what the client's own stamps are good for).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timeline import Timeline

TICKS_PER_S = 10_000
MS = 1000.0
Packed = dict[str, str | float | int | bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds since the run's start; `chunks`: when each chunk with text came."""

    kind: str
    sent: float
    prompt_tokens: int
    ok: bool
    chunks: tuple[float, ...]

    @property
    def ttft(self) -> float | None:
        """None: nothing came."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Between consecutive chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def pack(timelines: Iterable[Timeline], start: float) -> list[Packed]:
    """For a result. `start`: when the run began, on the timelines' clock. Rounding does not add up along a request."""
    return [
        {
            "kind": one.kind,
            "sent_ms": round((one.sent - start) * MS, 1),
            "prompt_tokens": one.prompt_tokens,
            "ok": one.ok,
            "gaps": _gaps(one),
        }
        for one in sorted(timelines, key=lambda timeline: timeline.sent)
    ]


def unpack(found: Sequence[Mapping[str, object]]) -> list[Sample]:
    """From a result. Raises KeyError, ValueError for what `pack` did not write."""
    return [_sample(one) for one in found]


def _gaps(timeline: Timeline) -> str:
    ticks = [round((at - timeline.sent) * TICKS_PER_S) for at in timeline.chunks]
    return " ".join(str(tick - before) for before, tick in zip([0, *ticks], ticks, strict=False))


def _sample(one: Mapping[str, object]) -> Sample:
    sent = float(str(one["sent_ms"])) / MS
    at, chunks = 0, []
    for gap in str(one["gaps"]).split():
        at += int(gap)
        chunks.append(sent + at / TICKS_PER_S)
    return Sample(str(one["kind"]), sent, int(str(one["prompt_tokens"])), bool(one["ok"]), tuple(chunks))
