"""The router's prefix index, filled: memory, how long a prompt's longest match takes, and how fast events are taken in.

    python -m benchmarks.prefix_index [--entries 10000000] [--workers 64]

Two fillings of a table made for that many entries: every routing block on one worker only, and every one on eight. A
*hit* is a prompt all of whose routing blocks are known, of one worker or of eight; a *miss* is one of which none is.
All calls are made as the router makes them: events with as many keys as a message holds, prompts with a list of keys.
Memory is what the process grew by; the keys are drawn as they are stored, and not kept.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.machine import describe_machine, today
from benchmarks.report import head, number, publish
from benchmarks.timeline import percentile
from cluster.core.clock import Clock, SystemClock
from cluster.core.keys import KEY_BYTES, KEYS_PER_MESSAGE, BlockKey
from router.prefix_index import PrefixIndex

RESULTS = Path(__file__).with_name("results")
PROMPTS = (1, 8, 32, 128, 512)  # routing blocks: 256 tokens each, so up to 128k tokens
ROUNDS = 2000
US, MS = 1e6, 1e3


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are (p50, p99). `shared`: workers that hold each block."""

    shared: int
    entries: int
    refused: int
    megabytes: float
    store_ms: tuple[float, float]
    stored_per_s: float
    remove_ms: tuple[float, float]
    hit_us: dict[int, tuple[float, float]]
    miss_us: dict[int, tuple[float, float]]
    leave_us: float
    sweep_ms: tuple[float, float]
    sweeps: int


class Measured:
    """Seconds of each call made through it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: list[float] = []

    def __call__(self, call: Callable[[], object]) -> None:
        began = self._clock.now()
        call()
        self.seconds.append(self._clock.now() - began)

    def spread(self, unit: float) -> tuple[float, float]:
        p50, p99 = percentile(self.seconds, 50), percentile(self.seconds, 99)
        assert p50 is not None
        assert p99 is not None
        return p50 * unit, p99 * unit


def measure(entries: int, workers: int, shared: int, clock: Clock) -> Figures:
    """Fill a table, ask it, and empty a part of it."""
    before = psutil.Process().memory_info().rss
    index = PrefixIndex(entries)
    numbers = [_joined(index, entries) for _ in range(workers)]
    fill = Measured(clock)
    for group, packed in _filling(entries, workers, shared):
        for worker in numbers[group * shared : (group + 1) * shared]:
            fill(partial(index.store, worker, packed))
    grown = psutil.Process().memory_info().rss - before
    held, refused = index.entries, index.refused
    hits = {blocks: _asked(index, blocks, workers // shared, shared, clock) for blocks in PROMPTS}
    misses = {blocks: _asked(index, blocks, 0, 0, clock) for blocks in PROMPTS}
    remove = Measured(clock)
    for group, packed in _filling(entries, workers, shared):
        if group == 0:
            remove(partial(index.remove, numbers[0], packed))
    leave, sweep = Measured(clock), Measured(clock)
    leave(lambda: index.leave(numbers[0]))
    while index.leaving:
        sweep(index.sweep)
    return Figures(
        shared=shared,
        entries=held,
        refused=refused,
        megabytes=grown / 1e6,
        store_ms=fill.spread(MS),
        stored_per_s=held / sum(fill.seconds),
        remove_ms=remove.spread(MS),
        hit_us=hits,
        miss_us=misses,
        leave_us=leave.spread(US)[0],
        sweep_ms=sweep.spread(MS),
        sweeps=len(sweep.seconds),
    )


def _joined(index: PrefixIndex, most: int) -> int:
    number = index.join(most)
    assert number is not None
    return number


def _draws(group: int) -> np.random.Generator:
    return np.random.default_rng((7, group))


def _filling(entries: int, workers: int, shared: int) -> Iterator[tuple[int, bytes]]:
    """Messages of each group of `shared` workers, in turn."""
    groups = workers // shared
    draws = [_draws(group) for group in range(groups)]
    left = entries // workers
    while left > 0:
        count = min(left, KEYS_PER_MESSAGE)
        left -= count
        for group in range(groups):
            yield group, draws[group].bytes(count * KEY_BYTES)


def _asked(index: PrefixIndex, blocks: int, groups: int, shared: int, clock: Clock) -> tuple[float, float]:
    """Microseconds of a match. Without groups nothing matches."""
    asked = Measured(clock)
    strange = np.random.default_rng(8)
    firsts = [_draws(group).bytes(blocks * KEY_BYTES) for group in range(groups)]
    for turn in range(ROUNDS):
        packed = firsts[turn % groups] if groups else strange.bytes(blocks * KEY_BYTES)
        keys: list[BlockKey] = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        found: dict[int, int] = {}

        def ask(keys: list[BlockKey] = keys, found: dict[int, int] = found) -> None:
            found.update(index.match(keys))

        asked(ask)
        assert len(found) == (shared if groups else 0), "the table does not know what it was told"
        assert set(found.values()) <= {blocks}
    return asked.spread(US)


def markdown(found: Sequence[Figures], machine: dict[str, str]) -> str:
    """The table."""
    lines = ["# The router's prefix index", "", *head(machine), ""]
    lines.append("| | " + " | ".join(f"each block on {figures.shared}" for figures in found) + " |")
    lines.append("| --- |" + " --- |" * len(found))

    def row(label: str, cell: Callable[[Figures], str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cell(figures) for figures in found) + " |")

    def times(found: dict[int, tuple[float, float]], blocks: int) -> str:
        return _pair(found[blocks])

    row("entries (a block on a worker)", lambda f: f"{f.entries:,}")
    row("refused", lambda f: f"{f.refused:,}")
    row("memory, MB", lambda f: number(f.megabytes))
    row("entries stored per second", lambda f: number(f.stored_per_s))
    row(f"storing {KEYS_PER_MESSAGE} keys, p50 / p99 ms", lambda f: _pair(f.store_ms))
    row(f"removing {KEYS_PER_MESSAGE} keys, p50 / p99 ms", lambda f: _pair(f.remove_ms))
    for blocks in PROMPTS:
        row(f"match of {blocks} blocks, all known, p50 / p99 us", partial(lambda b, f: times(f.hit_us, b), blocks))
    for blocks in PROMPTS:
        row(f"match of {blocks} blocks, none known, p50 / p99 us", partial(lambda b, f: times(f.miss_us, b), blocks))
    row("a worker leaves, us", lambda f: number(f.leave_us))
    row("one sweep, p50 / p99 ms", lambda f: _pair(f.sweep_ms))
    row("sweeps until its number is free again", lambda f: str(f.sweeps))
    return "\n".join([*lines, ""])


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(map(number, values))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when a key found no room."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_index", description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.prefix_index", arguments)
    found = [measure(options.entries, options.workers, shared, clock) for shared in (1, 8)]
    text = markdown(found, machine)
    document = {"machine": machine, "figures": [asdict(figures) for figures in found]}
    publish(options.out, f"{today(clock)}-prefix-index", text, document)
    return 1 if any(figures.refused for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
