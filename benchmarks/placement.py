"""Placement policies against each other: 8 prefill and 8 decode workers, modelled, on virtual time.

    python -m benchmarks.placement TRACE.jsonl... [--requests 4000] [--policies cost,round_robin] [--window 0]

Per trace (Mooncake's format, see modelled/traces.py):
1. The capacity of `round_robin` is found: the rate at which its prefill workers would be busy all the time.
2. Each policy plays the same requests at LOADS of that, in the trace's own rhythm.
3. Printed and written: TTFT p50, p99, mean, the share of prompt positions that nobody computed, and whether `cost` was
   best or within MARGIN of it.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe_machine, today
from benchmarks.modelled.cluster import Shape
from benchmarks.modelled.player import Outcome, Player
from benchmarks.modelled.traces import SCALE, Ask, arriving, read_trace, repeated
from benchmarks.report import head, number, publish
from benchmarks.timeline import percentile
from cluster.core.clock import SystemClock
from cluster.core.config import RouterSettings
from router.placement import POLICIES

RESULTS = Path(__file__).with_name("results")
LOADS = (0.5, 0.7, 0.8, 0.9)
BASE = "round_robin"
FIRST_RATE = 5.0  # requests per second: well below what the cluster can do
QUEUE = 1_000_000
MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one load. TTFT in seconds; `cached`: share of all prompt positions; `rate`: requests per second."""

    trace: str
    policy: str
    load: float
    rate: float
    p50: float
    p99: float
    mean: float
    cached: float
    local: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """What one process plays."""

    trace: Path
    requests: int | None
    policy: str
    load: float
    rate: float
    window: int


def settings(policy: str) -> RouterSettings:
    """A router with this policy and a line that nobody is turned away from."""
    return RouterSettings.model_validate({"policy": policy, "queue_limit": QUEUE})


def capacity(asks: Sequence[Ask], window: int) -> float:
    """Requests per second at which the prefill workers of BASE would be busy all the time.

    That is, of as many seconds as there are prefill workers, how many a request takes; measured where it is to be used,
    since prefixes that are hit depend on the rate.
    """
    found, rate = 0.0, FIRST_RATE
    for _ in range(2):
        player = Player(arriving(list(asks), rate), Shape(window=window), settings(BASE))
        player.play()
        workers = player.cluster.prefill.values()
        found = len(asks) * len(workers) / sum(worker.busy_s for worker in workers)
        rate = 0.8 * found
    return found


def play(run: Run) -> Cell:
    """One cell. Raises AssertionError when a request does not end well."""
    asks = arriving(read_trace(run.trace, run.requests), run.rate)
    outcomes = Player(asks, Shape(window=run.window), settings(run.policy)).play()
    assert all(outcome.good for outcome in outcomes), "a request did not end well"
    return measure(run, outcomes)


def measure(run: Run, outcomes: Sequence[Outcome]) -> Cell:
    """The figures of one run."""
    ttft = [o.ttft for o in outcomes if o.ttft is not None]
    return Cell(
        trace=run.trace.stem,
        policy=run.policy,
        load=run.load,
        rate=run.rate,
        p50=percentile(ttft, 50) or 0.0,
        p99=percentile(ttft, 99) or 0.0,
        mean=statistics.fmean(ttft),
        cached=sum(o.trace.cached_tokens for o in outcomes) / sum(o.ask.prompt_tokens for o in outcomes),
        local=statistics.fmean(o.trace.prefill_worker == "local" for o in outcomes),
        tpot_ms=statistics.fmean(o.tpot for o in outcomes if o.tpot is not None) * 1000,
    )


def behind(cells: Sequence[Cell]) -> list[str]:
    """Where `cost` is neither best nor within MARGIN of the best, in words."""
    found = []
    for trace, load in sorted({(cell.trace, cell.load) for cell in cells}):
        row = {cell.policy: cell for cell in cells if (cell.trace, cell.load) == (trace, load)}
        for key in ("p50", "p99", "mean"):
            best = min(row.values(), key=lambda cell: getattr(cell, key))
            if getattr(row["cost"], key) > getattr(best, key) * MARGIN:
                ratio = getattr(row["cost"], key) / getattr(best, key)
                found.append(f"{trace} at {load}: TTFT {key} is {ratio:.3f} times that of {best.policy}")
        best = max(row.values(), key=lambda cell: cell.cached)
        if row["cost"].cached * MARGIN < best.cached:
            ratio = row["cost"].cached / best.cached
            found.append(f"{trace} at {load}: cached positions are {ratio:.3f} times those of {best.policy}")
    return found


def markdown(cells: Sequence[Cell], facts: Sequence[str], machine: dict[str, str]) -> str:
    """The whole table."""
    lines = ["# Placement policies, modelled", ""]
    lines += head(machine)
    lines += [f"- {fact}" for fact in facts]
    for trace in dict.fromkeys(cell.trace for cell in cells):
        lines += ["", f"## {trace}", ""]
        lines += [
            "| load | policy | TTFT p50, ms | p99, ms | mean, ms | cached positions | read by decode | TPOT, ms |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for cell in (cell for cell in cells if cell.trace == trace):
            times = " | ".join(number(value * 1000) for value in (cell.p50, cell.p99, cell.mean))
            shares = f"{cell.cached:.1%} | {cell.local:.1%}"
            lines.append(f"| {cell.load} | {cell.policy} | {times} | {shares} | {number(cell.tpot_ms)} |")
        for load in dict.fromkeys(cell.load for cell in cells):
            row = {c.policy: c for c in cells if (c.trace, c.load) == (trace, load)}
            if {"cost", BASE} <= row.keys():
                ratio = row[BASE].mean / row["cost"].mean
                lines += ["", f"At {load} the mean TTFT of `{BASE}` is {ratio:.1f} times that of `cost`."]
    lines += ["", "## `cost` against the best", ""]
    lines += [f"- {line}" for line in behind(cells)] or [f"Best, or within {MARGIN - 1:.0%} of it, in every cell."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code: 0, or 1 when `cost` is behind somewhere."""
    options = _parse()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.placement")
    runs, facts = (
        [],
        [
            f"8 prefill and 8 decode workers as modelled/hardware.py; admission window: {options.window or 'none'}",
            f"one position stands for {SCALE} of the trace, in prompts, pools and rates: times are those of the trace",
        ],
    )
    with ProcessPoolExecutor(options.jobs) as pool:
        asks = [read_trace(path, options.requests) for path in options.traces]
        rates = list(pool.map(capacity, asks, [options.window] * len(asks)))
        for path, requests, rate in zip(options.traces, asks, rates, strict=True):
            facts.append(
                f"{path.stem}: {len(requests)} requests; {repeated(requests):.0%} of their positions repeat;"
                f" capacity of {BASE} {rate:.2f} requests/s"
            )
            runs += [
                Run(path, options.requests, policy, load, load * rate, options.window)
                for load in LOADS
                for policy in options.policies.split(",")
            ]
        cells = []
        for cell in pool.map(play, runs):
            cells.append(cell)
            print(f"{cell.trace} {cell.load} {cell.policy}: mean TTFT {cell.mean * 1000:.0f} ms", flush=True)
    text = markdown(cells, facts, machine)
    document = {"machine": machine, "facts": facts, "cells": [asdict(cell) for cell in cells]}
    publish(options.out, f"{today(clock)}-placement", text, document)
    return 1 if behind(cells) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--requests", type=int, help="the first so many of each trace; all when left out")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--window", type=int, default=0, help="admission window of a prefill worker, scaled positions")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
