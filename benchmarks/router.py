"""`python -m benchmarks.router --mock MOCK --load LOAD ...`: what the router costs, beside other routers.

    headrace, at once     all tokens of an answer come from the worker in one message, as the mock writes them at once
    headrace, stepped     every token in a step of 5 ms (the emit interval), a message per step for all that runs
    others                bare proxies before the mock (MOCK), which neither tokenise nor detokenise
    mock, direct          no router: what is added is measured against it, Headrace's worker and session included
One core is the router's; the client (LOAD), the mock and the worker run on the others. All stay up and take turns,
round by round; figures are medians over rounds with the least and greatest. `per core` divides by the processor time of
the router's processes, which other work on the machine disturbs less than the clock.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from benchmarks.http_client import HttpClient
from benchmarks.machine import describe_machine, today
from benchmarks.report import head, publish
from benchmarks.router_peers import MODEL, Cores, Door, headrace, mock, peer
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, Unavailable

RESULTS = Path(__file__).with_name("results")
TOKENS = 32  # of every answer, as the load asks for
MANY = 64
WARM = 64
Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. `requests`: at concurrency MANY; a tenth of them one at a time."""

    mock: Path
    load: Path
    python: str
    model: str
    routers: dict[str, str]
    rounds: int
    requests: int


@dataclass(slots=True)
class Row:
    """One front door: a sample of figures per round."""

    door: Door
    samples: list[Sample] = field(default_factory=list)

    def spread(self, key: str) -> tuple[float, float, float] | None:
        """Median, least, greatest; None where it was not measured."""
        values = [sample[key] for sample in self.samples if key in sample]
        return (statistics.median(values), min(values), max(values)) if values else None


async def measure(options: Options, clock: Clock) -> list[Row]:
    """Every door, round by round. Raises Unavailable."""
    cores = share_cores()
    os.sched_setaffinity(0, set(cores.others))  # for the children
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(mock(options.mock, options.python, clock))
        other = await stack.enter_async_context(mock(options.mock, options.python, clock))
        rows = [Row(upstream)]
        for name, worker in (("headrace, at once", "at_once"), ("headrace, stepped", "stepped")):
            door = await stack.enter_async_context(headrace(name, worker, options.model, cores, clock))
            rows.append(Row(door))
        for name, command in options.routers.items():
            urls = {"a": f"http://127.0.0.1:{upstream.port}", "b": f"http://127.0.0.1:{other.port}", "port": "{port}"}
            words = [word.format(**urls) for word in shlex.split(command)]
            rows.append(Row(await stack.enter_async_context(peer(name, words, cores, clock))))
        for number in range(options.rounds):
            base: Sample = {}
            for row in rows:
                sample = await _sample(row.door, options, clock)
                base = base or sample
                for key in ("p50_1", "p99_1", f"p50_{MANY}", f"p99_{MANY}"):
                    sample[f"added_{key}"] = sample[key] - base[key]
                row.samples.append(sample)
                print(f"round {number + 1}: {row.door.name}: {_line(sample)}", file=sys.stderr)
        return rows


def share_cores() -> Cores:
    """The last core is the router's."""
    every = sorted(os.sched_getaffinity(0))
    return Cores((every[-1],), tuple(every[:-1]) or tuple(every))


async def _sample(door: Door, options: Options, clock: Clock) -> Sample:
    sample: Sample = {}
    for concurrency, requests in ((1, max(50, options.requests // 10)), (MANY, options.requests)):
        before, cpu = await _counts(door, clock), door.cpu_s()
        told = await _load(door, options, concurrency, requests)
        cpu, after = door.cpu_s() - cpu, await _counts(door, clock)
        served = requests + WARM
        if door.counts and (after[0] - before[0], after[1] - before[1]) != (served, served * TOKENS):
            raise Unavailable(f"{door.name}: {before} -> {after}, which is not {served} whole answers")
        if not door.counts and told["err"]:
            raise Unavailable(f"{door.name}: {told['err']} answers of {requests} were wrong")
        sample[f"p50_{concurrency}"], sample[f"p99_{concurrency}"] = told["p50_ms"], told["p99_ms"]
        sample[f"req_s_{concurrency}"] = told["req_s"]
        if door.pids:
            sample[f"cpu_ms_{concurrency}"] = 1000 * cpu / served
    sample["tok_s"] = TOKENS * sample[f"req_s_{MANY}"]
    if door.pids:
        sample["req_core"] = 1000 / sample[f"cpu_ms_{MANY}"]
        sample["tok_core"] = TOKENS * sample["req_core"]
    return sample


async def _load(door: Door, options: Options, concurrency: int, requests: int) -> dict[str, float]:
    words = (str(options.load), "127.0.0.1", str(door.port), str(concurrency), str(requests), str(WARM))
    process = await asyncio.create_subprocess_exec(options.python, *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise Unavailable(f"the load ended with {process.returncode}")
    told: dict[str, float] = orjson.loads(out.splitlines()[-1])
    if told["n"] != requests:
        raise Unavailable(f"{door.name}: {told['n']} answers of {requests}")
    return told


async def _counts(door: Door, clock: Clock) -> tuple[int, int]:
    """Answers that succeeded and tokens delivered so far, by the router's own count."""
    if door.counts is None:
        return 0, 0
    async with HttpClient(door.counts, MODEL, clock) as client:
        text = (await client.get("/metrics")).body.decode()
    counts = {"headrace_requests_total": 0.0, "headrace_output_tokens_total": 0.0}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        family = name.partition("{")[0]
        if family in counts and ("outcome=" not in name or 'outcome="ok"' in name):
            counts[family] += float(value)
    return int(counts["headrace_requests_total"]), int(counts["headrace_output_tokens_total"])


COLUMNS = (
    (f"req_s_{MANY}", "requests/s"),
    ("tok_s", "tokens/s"),
    ("req_core", "requests/s per core"),
    ("tok_core", "tokens/s per core"),
    (f"cpu_ms_{MANY}", "CPU ms a request"),
    ("added_p50_1", "added p50 at 1, ms"),
    ("added_p99_1", "added p99 at 1, ms"),
    (f"added_p50_{MANY}", f"added p50 at {MANY}, ms"),
    (f"added_p99_{MANY}", f"added p99 at {MANY}, ms"),
)


def markdown(rows: Sequence[Row], machine: dict[str, str]) -> str:
    """The table."""
    lines = ["# Router overhead", "", *head(machine), ""]
    lines += [f"Answers of {TOKENS} tokens; {MANY} at a time but where it says 1. Median (least - greatest).", ""]
    lines.append("| | " + " | ".join(label for _, label in COLUMNS) + " |")
    lines.append("| --- |" + " --- |" * len(COLUMNS))
    for row in rows:
        cells = [_cell(row.spread(key)) for key, _ in COLUMNS]
        lines.append(f"| {row.door.name} | " + " | ".join(cells) + " |")
    assert __doc__ is not None
    return "\n".join([*lines, "", *__doc__.split("\n", 2)[2].strip().splitlines(), ""])


def _cell(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 2 if spread[0] < 100 else 0
    middle, low, high = (f"{value:,.{digits}f}" for value in spread)
    return f"{middle} ({low} - {high})"


def _line(sample: Sample) -> str:
    return ", ".join(f"{label} {sample[key]:,.2f}" for key, label in COLUMNS if key in sample)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when it could not be run or an answer was wrong."""
    options, out = _parse(arguments)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.router", arguments)
    try:
        rows = uvloop.run(measure(options, clock))
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    text = markdown(rows, machine)
    found = {row.door.name: row.samples for row in rows}
    publish(out, f"{today(clock)}-router", text, {"machine": machine, "rows": found})
    return 0


def _parse(arguments: Sequence[str] | None) -> tuple[Options, Path]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description="The router beside others")
    parser.add_argument("--mock", type=Path, required=True, help="a mock server: MOCK PORT; answers have 32 tokens")
    parser.add_argument("--load", type=Path, required=True, help="the client: LOAD HOST PORT CONCURRENCY REQUESTS WARM")
    parser.add_argument("--python", default=sys.executable, help="runs these two (uvloop is used where it is there)")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router; {port} is its port, {a} and {b} are URLs of mock servers",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000, help=f"a round, {MANY} at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    routers = dict(each.split("=", 1) for each in given.router)
    options = Options(given.mock, given.load, given.python, given.model, routers, given.rounds, given.requests)
    return options, given.out


if __name__ == "__main__":
    sys.exit(main())
