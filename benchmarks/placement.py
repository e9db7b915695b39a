"""Placement policies against each other: 8 prefill and 8 decode workers, modelled, on virtual time.

    python -m benchmarks.placement TRACE.jsonl[:REQUESTS]... [--policies cost,round_robin] [--window 0]

Per trace (Mooncake's format, see modelled/traces.py):
1. The capacity of `round_robin` is found: the rate at which its prefill workers would be busy all the time.
2. Each policy plays the same requests at LOADS of that, in the trace's own rhythm.
3. Printed and written: TTFT p50, p99, mean, the share of prompt positions that nobody computed, what no policy could
   be better than (modelled/floor.py), and whether `cost` was best or within MARGIN of it. Ratios come with the middle
   95 % of what they are when stretches of the trace are drawn again, the same ones for both policies.

It takes about 8 ms of a core per request and cell: for 2,000 + 4,000 requests, 16 cells each, a quarter of an hour of
two cores.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import describe_machine, today
from benchmarks.modelled.cluster import NODE, Shape
from benchmarks.modelled.floor import Floor, floor
from benchmarks.modelled.player import Outcome, Player
from benchmarks.modelled.traces import BLOCK, SCALE, Ask, arriving, read_trace, repeated
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
ENDLESS, POOLS = "endless cache", "all pools as one"
MARGIN = 1.02
STRETCHES, DRAWS = 40, 200  # of a trace that are drawn again, and how often

WHY = (
    "Llama-3 70B in 16 bit on nodes of eight H100, prompts at their full lengths: a model of the size that is served in"
    " split pools of whole nodes; rates are a roofline (modelled/hardware.py), settled before any policy was played",
    "caches are what such a node has left beside the weights, 1,370,000 positions; nothing is kept in host memory",
    "chunks of 2,048 positions, shortest prompt first; cost grows with depth; decode's steps and the prompts that it"
    " reads share its time, and such a prompt takes whole steps",
)


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
    ttft: tuple[float, ...] = ()  # of every request, in the trace's order


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
        ttft=tuple(ttft),
    )


def spread(a: Cell, b: Cell, key: str) -> tuple[float, float]:
    """The middle 95 % of a's figure / b's, over DRAWS of STRETCHES of the trace. `key`: p50, p99 or mean."""
    rng = random.Random(0)
    size = -(-len(a.ttft) // STRETCHES)
    starts = range(0, len(a.ttft), size)
    ratios = []
    for _ in range(DRAWS):
        drawn = rng.choices(starts, k=len(starts))
        x, y = ([t for at in drawn for t in cell.ttft[at : at + size]] for cell in (a, b))
        ratios.append(_figure(x, key) / _figure(y, key))
    ratios.sort()
    return ratios[DRAWS // 40], ratios[-DRAWS // 40]


def _figure(ttft: Sequence[float], key: str) -> float:
    return statistics.fmean(ttft) if key == "mean" else percentile(list(ttft), int(key[1:])) or 0.0


def behind(cells: Sequence[Cell]) -> list[str]:
    """Where `cost` is neither best nor within MARGIN of the best, in words."""
    found = []
    for trace, load in sorted({(cell.trace, cell.load) for cell in cells}):
        row = {cell.policy: cell for cell in cells if (cell.trace, cell.load) == (trace, load)}
        for key in ("p50", "p99", "mean"):
            best = min(row.values(), key=lambda cell: getattr(cell, key))
            if getattr(row["cost"], key) > getattr(best, key) * MARGIN:
                ratio = getattr(row["cost"], key) / getattr(best, key)
                low, high = spread(row["cost"], best, key)
                text = f"TTFT {key} is {ratio:.3f} times that of {best.policy} ({low:.2f} - {high:.2f})"
                found.append(f"{trace} at {load}: {text}")
        best = max(row.values(), key=lambda cell: cell.cached)
        if row["cost"].cached * MARGIN < best.cached:
            ratio = row["cost"].cached / best.cached
            found.append(f"{trace} at {load}: cached positions are {ratio:.3f} times those of {best.policy}")
    return found


def markdown(
    cells: Sequence[Cell],
    told: Sequence[str],
    floors: dict[str, dict[str, Floor]],
    facts: Sequence[str],
    machine: dict[str, str],
) -> str:
    """The whole table. `told`: where `cost` is behind; `floors`: by trace and name."""
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
        for name, least in floors[trace].items():
            times = " | ".join(number(value * 1000) for value in (least.p50, least.p99, least.mean))
            lines.append(f"| any | alone, {name} | {times} | {least.cached:.1%} | | |")
        for load in dict.fromkeys(cell.load for cell in cells):
            row = {c.policy: c for c in cells if (c.trace, c.load) == (trace, load)}
            if {"cost", BASE} <= row.keys():
                ratio, most = (row[BASE].mean / mean for mean in (row["cost"].mean, floors[trace][ENDLESS].mean))
                low, high = spread(row[BASE], row["cost"], "mean")
                text = (
                    f"At {load} the mean TTFT of `{BASE}` is {ratio:.1f} times that of `cost` ({low:.1f} - {high:.1f});"
                )
                lines += ["", f"{text} no policy could make that more than {most:.1f}."]
    lines += ["", "## `cost` against the best", ""]
    lines += [f"- {line}" for line in told] or [f"Best, or within {MARGIN - 1:.0%} of it, in every cell."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code: 0, or 1 when `cost` is behind somewhere."""
    options = _parse()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.placement")
    runs, floors = [], {}
    facts = [
        *WHY,
        f"one position stands for {SCALE} of the trace, in prompts, pools and rates: times are those of the trace",
        f"admission window: {options.window or 'none'}",
        "alone: each request on an idle cluster, with the longest prefix that anybody could have by then",
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        asks = [read_trace(path, most) for path, most in options.traces]
        rates = list(pool.map(capacity, asks, [options.window] * len(asks)))
        for (path, most), requests, rate in zip(options.traces, asks, rates, strict=True):
            part = "all" if most is None else "the first"
            facts.append(
                f"{path.stem}: {part} {len(requests)} requests; {repeated(requests):.0%} of their positions repeat;"
                f" capacity of {BASE} {rate:.2f} requests/s"
            )
            blocks = NODE.pool_positions // BLOCK * 16
            floors[path.stem] = {ENDLESS: floor(requests, NODE), POOLS: floor(requests, NODE, blocks)}
            runs += [
                Run(path, most, policy, load, load * rate, options.window)
                for load in LOADS
                for policy in options.policies.split(",")
            ]
        cells = []
        for cell in pool.map(play, runs):
            cells.append(cell)
            print(f"{cell.trace} {cell.load} {cell.policy}: mean TTFT {cell.mean * 1000:.0f} ms", flush=True)
    told = behind(cells)
    text = markdown(cells, told, floors, facts, machine)
    figures = [asdict(replace(cell, ttft=())) for cell in cells]
    document = {
        "machine": machine,
        "facts": facts,
        "cells": figures,
        "floors": {t: {name: asdict(least) for name, least in found.items()} for t, found in floors.items()},
    }
    publish(options.out, f"{today(clock)}-placement", text, document)
    return 1 if told else 0


def _first(text: str) -> tuple[Path, int | None]:
    path, _, most = text.rpartition(":")
    return (Path(path), int(most)) if path else (Path(text), None)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=_first, nargs="+", metavar="TRACE[:REQUESTS]", help="the first so many, or all")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--window", type=int, default=0, help="admission window of a prefill worker, scaled positions")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
