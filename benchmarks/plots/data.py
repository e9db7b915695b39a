"""What pictures show, from a result's JSON. Pure; nothing of matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.samples import Sample, unpack

NAMES = ("split", "aggregated")
CHAT = "chat"
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curves:
    """One workload: per set-up the seconds to first tokens and between tokens, of all its runs together."""

    workload: str
    ttft: dict[str, list[float]]
    itl: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Steps:
    """How many there are from each time on."""

    times: list[float]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Course:
    """One run of one set-up: its requests in order of sending; those with long prompts are of another kind."""

    setup: str
    seconds: float
    samples: list[Sample]

    @property
    def chats(self) -> list[Sample]:
        return [one for one in self.samples if one.kind == CHAT]

    @property
    def long_reads(self) -> list[tuple[float, float]]:
        """From sending a long prompt to its first token."""
        return [(one.sent, one.chunks[0]) for one in self.samples if one.kind != CHAT and one.chunks]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, how long it was), of every gap between tokens of chats."""
        return [
            (after, after - before)
            for one in self.chats
            for before, after in zip(one.chunks, one.chunks[1:], strict=False)
        ]

    @property
    def reading(self) -> Steps:
        """Requests whose first token has not come."""
        return steps([(one.sent, one.chunks[0]) for one in self.samples if one.chunks])

    @property
    def writing(self) -> Steps:
        """Requests between their first and their last token."""
        return steps([(one.chunks[0], one.chunks[-1]) for one in self.samples if one.chunks])


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a load curve. `times` the capacity; rates in requests per second, times in seconds."""

    times: float
    offered: float
    goodput: float
    refused: float
    ttft_p50: float | None
    ttft_p99: float | None


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """How a cluster behaves as more is asked. `capacity` in requests per second, where it was measured."""

    name: str
    points: list[Load]
    slo_s: float | None
    capacity: float | None


def steps(spans: Sequence[tuple[float, float]]) -> Steps:
    """How many of these spans hold at each time."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, now = [0.0], [0], 0
    for at, change in changes:
        now += change
        if times[-1] == at:
            counts[-1] = now
        else:
            times.append(at)
            counts.append(now)
    return Steps(times, counts)


def curves(document: Document) -> list[Curves]:
    """Of every workload whose runs have samples."""
    found: dict[str, Curves] = {}
    for run in document.get("runs", ()):
        if not (samples := [one for one in unpack(run.get("samples", ())) if one.kind == CHAT and one.ok]):
            continue
        known = found.setdefault(run["workload"], Curves(run["workload"], {}, {}))
        known.ttft.setdefault(run["setup"], []).extend(one.ttft for one in samples if one.ttft is not None)
        known.itl.setdefault(run["setup"], []).extend(gap for one in samples for gap in one.gaps)
    return list(found.values())


def courses(document: Document) -> list[Course]:
    """The first run with long prompts of each set-up, split first; [] unless there are both."""
    found: dict[str, Course] = {}
    for run in document.get("runs", ()):
        samples = unpack(run.get("samples", ()))
        if any(one.kind != CHAT for one in samples):
            found.setdefault(run["setup"], Course(run["setup"], float(run["seconds"]), samples))
    return [found[name] for name in NAMES] if found.keys() >= set(NAMES) else []


def load_curves(document: Document) -> list[LoadCurve]:
    """Of benchmarks.overload, and of benchmarks.overload_modelled by trace."""
    if "points" in document:
        points = [_measured(point) for point in document["points"]]
        return [LoadCurve("", points, document.get("slo_s"), document.get("capacity"))]
    found: dict[str, LoadCurve] = {}
    for cell in document.get("cells", ()):
        if "goodput" in cell and "refused" in cell:
            curve = found.setdefault(cell["trace"], LoadCurve(cell["trace"], [], document.get("slo_s"), None))
            curve.points.append(_modelled(cell))
    return list(found.values())


def _measured(point: Document) -> Load:
    seconds = point["sent"] / point["rate"] if point["rate"] else 0.0
    refused = point["refused"] / seconds if seconds else 0.0
    p50, p99 = (None if point[name] is None else point[name] / 1000 for name in ("ttft_p50", "ttft_p99"))
    return Load(point["times"], point["rate"], point["goodput"], refused, p50, p99)


def _modelled(cell: Document) -> Load:
    refused = cell["rate"] * cell["refused"] / cell["asked"] if cell["asked"] else 0.0
    return Load(cell["load"], cell["rate"], cell["goodput"], refused, cell["ttft_p50"], cell["ttft_p99"])
