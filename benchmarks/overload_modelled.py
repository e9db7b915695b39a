"""More requests than the cluster can serve, on virtual time: what overload.py asks for real, at a larger size.

    python -m benchmarks.overload_modelled TRACE.jsonl... [--requests 3000] [--slo 5] [--workers 8]

As many prefill as decode workers, modelled (modelled/hardware.py), with the admission window that real prefill workers
have by default; the router's brain is the real one. Per trace (Mooncake's format, see modelled/traces.py):
1. The capacity is found: prompt positions per second that are served in time when far more come, as requests per second
   of the trace's mean length. (Counted in requests it would be that of the short ones, which are let in more often.)
2. The same requests are played at LOADS of that, in the trace's own rhythm, without anybody coming again.
3. Goodput, waiting, who was refused and how soon, and the longest queue are printed and written.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe_machine, today
from benchmarks.modelled.cluster import Shape
from benchmarks.modelled.player import Outcome, Player
from benchmarks.modelled.traces import SCALE, Ask, arriving, read_trace
from benchmarks.pictures import leave_pictures
from benchmarks.report import head, number, publish
from benchmarks.timeline import percentile
from cluster.core.clock import SystemClock
from cluster.core.config import HandoffSettings, RouterSettings
from cluster.core.errors import Overloaded

RESULTS = Path(__file__).with_name("results")
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
FAR_MORE = 4.0
FIRST_RATE = 5.0  # requests per second and worker; more than any can do
WINDOW = HandoffSettings().admission_window_tokens // SCALE
SOON_S = 0.05
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one load. Seconds, requests per second; `late`: refused, but not within SOON_S."""

    trace: str
    load: float
    rate: float
    asked: int
    served: int
    refused: int
    late: int
    goodput: float
    good_positions: float
    ttft_p50: float | None
    ttft_p99: float | None
    refusal_p99: float | None
    longest_queue: int
    queued_tokens: int


@dataclass(slots=True)
class Queue:
    """The greatest values seen."""

    requests: int = 0
    tokens: int = 0


def play(asks: Sequence[Ask], workers: int, slo_s: float) -> tuple[list[Outcome], Queue]:
    """All requests on a fresh cluster. Raises AssertionError when it holds anything afterwards."""
    player = Player(asks, Shape(workers, workers, window=WINDOW), RouterSettings(slo_ttft_s=slo_s))
    seen, core, loop = Queue(), player.cluster.routers[0].core, player.cluster.loop

    def look() -> None:
        gauges = core.gauges()
        seen.requests, seen.tokens = max(seen.requests, gauges["queued"]), max(seen.tokens, gauges["queued_tokens"])
        loop.after(LOOK_S, look)

    look()
    return player.play(), seen


def good(outcomes: Sequence[Outcome], slo_s: float) -> list[Ask]:
    """Those that ended well and began in time."""
    return [o.ask for o in outcomes if o.good and o.ttft is not None and o.ttft <= slo_s]


def positions(asks: Sequence[Ask]) -> int:
    """Of all their prompts."""
    return sum(ask.prompt_tokens for ask in asks)


def span_s(asks: Sequence[Ask]) -> float:
    return asks[-1].at - asks[0].at


def capacity(asks: Sequence[Ask], workers: int, slo_s: float) -> float:
    """Requests of mean length served in time per second when FAR_MORE come."""
    found = FIRST_RATE * workers / FAR_MORE
    for _ in range(2):
        busy = arriving(list(asks), FAR_MORE * found)
        share = positions(good(play(busy, workers, slo_s)[0], slo_s)) / positions(busy)
        found = share * len(busy) / span_s(busy)
    return found


def measure(trace: str, load: float, rate: float, asks: Sequence[Ask], workers: int, slo_s: float) -> Cell:
    """One cell. Raises AssertionError when a request ends in another way than well, or refused."""
    asks = arriving(list(asks), rate)
    outcomes, queue = play(asks, workers, slo_s)
    refused = [o for o in outcomes if isinstance(o.error, Overloaded)]
    told = [o.ended for o in refused if o.ended is not None]
    served = [o.ttft for o in outcomes if o.good and o.ttft is not None]
    assert len(refused) + len(served) == len(outcomes), "a request ended neither well nor refused"
    return Cell(
        trace=trace,
        load=load,
        rate=rate,
        asked=len(outcomes),
        served=len(served),
        refused=len(refused),
        late=sum(seconds > SOON_S for seconds in told),
        goodput=len(good(outcomes, slo_s)) / span_s(asks),
        good_positions=positions(good(outcomes, slo_s)) * SCALE / span_s(asks),
        ttft_p50=percentile(served, 50),
        ttft_p99=percentile(served, 99),
        refusal_p99=percentile(told, 99),
        longest_queue=queue.requests,
        queued_tokens=queue.tokens * SCALE,
    )


def markdown(cells: Sequence[Cell], facts: Sequence[str], machine: dict[str, str]) -> str:
    """The whole table."""
    lines = ["# Overload, modelled", "", *head(machine)]
    lines += [f"- {fact}" for fact in facts]
    for trace in dict.fromkeys(cell.trace for cell in cells):
        rows = [cell for cell in cells if cell.trace == trace]
        peaks = max(cell.goodput for cell in rows), max(cell.good_positions for cell in rows)
        lines += [
            "",
            f"## {trace}",
            "",
            f"Goodput at {rows[-1].load:g} times capacity: {rows[-1].goodput / peaks[0]:.1%} of its peak in requests,"
            f" {rows[-1].good_positions / peaks[1]:.1%} in prompt positions.",
            "",
            "| load | asked/s | served | refused | of these not at once | good requests/s | good positions/s "
            "| TTFT p50, s | p99, s "
            "| refused within, p99, s | longest queue | its tokens |",
            "| --- " * 12 + "|",
        ]
        for c in rows:
            figures = (c.rate, c.served, c.refused, c.late, c.goodput, c.good_positions, c.ttft_p50, c.ttft_p99)
            shown = " | ".join(map(number, (*figures, c.refusal_p99, c.longest_queue, c.queued_tokens)))
            lines.append(f"| {c.load:g} x | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code 0."""
    options = _parse()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.overload_modelled")
    workers, slo_s = options.workers, options.slo
    facts = [
        f"{workers} prefill and {workers} decode workers as modelled/hardware.py, admission window {WINDOW * SCALE}",
        f"one position stands for {SCALE} of the trace; SLO: first token within {slo_s:g} s",
    ]
    cells = []
    for path in options.traces:
        asks = read_trace(path, options.requests)
        most = capacity(asks, workers, slo_s)
        facts.append(f"{path.stem}: {len(asks)} requests; {most:.2f} a second are served in time at most")
        for load in LOADS:
            cells.append(measure(path.stem, load, load * most, asks, workers, slo_s))
            print(f"{path.stem} at {load:g}: {cells[-1].goodput:.2f} good a second", flush=True)
    text = markdown(cells, facts, machine)
    document = {"machine": machine, "facts": facts, "cells": [asdict(cell) for cell in cells]}
    publish(options.out, stem := f"{today(clock)}-overload-modelled", text, document)
    leave_pictures(options.out / f"{stem}.json")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload_modelled", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--requests", type=int, help="the first so many of each trace; all when left out")
    parser.add_argument("--slo", type=float, default=5.0, help="seconds to the first token")
    parser.add_argument("--workers", type=int, default=8, help="of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
