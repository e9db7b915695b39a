"""What pictures show, from a result's JSON. Pure; nothing of matplotlib.

Everything here raises ValueError, and says what, for JSON that no benchmark wrote.
"""

from collections.abc import Iterable, Mapping, Sequence
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


def in_order(setups: Iterable[str]) -> list[str]:
    """Each once, as they came; a program's split before its aggregated, and both before whatever else it can be."""
    names = list(dict.fromkeys(setups))
    programs = list(dict.fromkeys(name.partition(" ")[0] for name in names if name not in NAMES))

    def key(name: str) -> tuple[int, int]:
        kind = name.rpartition(" ")[2]
        place = -1 if name in NAMES else programs.index(name.partition(" ")[0])
        return place, NAMES.index(kind) if kind in NAMES else len(NAMES)

    return sorted(names, key=key)


def curves(document: Document) -> list[Curves]:
    """Of every workload whose runs have samples."""
    found: dict[str, Curves] = {}
    for run in _rows(document, "runs"):
        if not (samples := [one for one in _samples(run) if one.kind == CHAT and one.ok]):
            continue
        workload, setup = _word(run, "workload"), _word(run, "setup")
        known = found.setdefault(workload, Curves(workload, {}, {}))
        known.ttft.setdefault(setup, []).extend(one.ttft for one in samples if one.ttft is not None)
        known.itl.setdefault(setup, []).extend(gap for one in samples for gap in one.gaps)
    return list(found.values())


def courses(document: Document) -> list[Course]:
    """The first run with long prompts of each set-up, split first; [] when there are not two to compare."""
    found: dict[str, Course] = {}
    for run in _rows(document, "runs"):
        samples = _samples(run)
        if any(one.kind != CHAT for one in samples):
            setup = _word(run, "setup")
            found.setdefault(setup, Course(setup, _number(run, "seconds"), samples))
    return [found[name] for name in in_order(found)] if len(found) > 1 else []


def load_curves(document: Document) -> list[LoadCurve]:
    """Of benchmarks.overload, and of benchmarks.overload_modelled by trace."""
    slo_s = _number_or_none(document, "slo_s")
    if points := [_measured(point) for point in _rows(document, "points")]:
        return [LoadCurve("", points, slo_s, _number_or_none(document, "capacity"))]
    found: dict[str, LoadCurve] = {}
    for cell in _rows(document, "cells"):
        if "goodput" in cell and "refused" in cell:
            trace = _word(cell, "trace")
            curve = found.setdefault(trace, LoadCurve(trace, [], slo_s, None))
            curve.points.append(_modelled(cell))
    return list(found.values())


def _measured(point: Document) -> Load:
    rate = _number(point, "rate")
    seconds = _number(point, "sent") / rate if rate else 0.0
    refused = _number(point, "refused") / seconds if seconds else 0.0
    waits = [_number_or_none(point, name) for name in ("ttft_p50", "ttft_p99")]
    p50, p99 = (None if wait is None else wait / 1000 for wait in waits)
    return Load(_number(point, "times"), rate, _number(point, "goodput"), refused, p50, p99)


def _modelled(cell: Document) -> Load:
    rate, asked = _number(cell, "rate"), _number(cell, "asked")
    refused = rate * _number(cell, "refused") / asked if asked else 0.0
    p50, p99 = (_number_or_none(cell, name) for name in ("ttft_p50", "ttft_p99"))
    return Load(_number(cell, "load"), rate, _number(cell, "goodput"), refused, p50, p99)


def _rows(document: Document, name: str) -> list[Document]:
    """The objects in a list; [] where there is none of this name."""
    found = document.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} is not a list of objects")
    return found


def _samples(run: Document) -> list[Sample]:
    try:
        return unpack(_rows(run, "samples"))
    except KeyError as error:
        raise ValueError(f"a sample has no {error.args[0]}") from error


def _word(row: Document, name: str) -> str:
    if not isinstance(value := row.get(name), str):
        raise ValueError(f"{name} is not text but {value!r}")
    return value


def _number(row: Document, name: str) -> float:
    if not isinstance(value := row.get(name), int | float):
        raise ValueError(f"{name} is not a number but {value!r}")
    return float(value)


def _number_or_none(row: Document, name: str) -> float | None:
    return None if row.get(name) is None else _number(row, name)
