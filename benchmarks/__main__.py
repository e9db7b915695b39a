"""`python -m benchmarks [--quick | --full] [--model MODEL] [--set key=value]`: measure, print the table, write it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.bench import Bench, Outcome, Plan
from benchmarks.machine import describe_machine, today
from benchmarks.pictures import leave_pictures
from benchmarks.report import document, markdown, publish
from benchmarks.workloads import profile
from cluster.core.clock import SystemClock
from cluster.core.errors import HeadraceError
from cluster.models.pull import pull
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache

RESULTS = Path(__file__).with_name("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when it could not be run or a request failed."""
    options = _parse(arguments)
    clock = SystemClock()
    name = "quick" if options.quick else "full" if options.full else "default"
    plan = Plan(profile(name), options.model, options.set, overhead=not options.no_overhead)
    machine = describe_machine(clock, "benchmarks", arguments)
    try:
        if options.model in KNOWN_MODELS:
            pull(options.model, default_cache())
        outcome: Outcome = uvloop.run(Bench(plan, clock).run())
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    text = markdown(plan, outcome, machine)
    stem = f"{today(clock)}-{options.model.rstrip('/').rsplit('/', 1)[-1]}-{name}"
    publish(options.out, stem, text, document(plan, outcome, machine))
    leave_pictures(options.out / f"{stem}.json")
    return 1 if any(run.errors for run in outcome.runs) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Split against aggregated, and the router"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="2 minutes, for a first look")
    size.add_argument("--full", action="store_true", help="three seeds, half an hour")
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a Hugging Face folder, or tracer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for both set-ups")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--no-overhead", action="store_true", help="leave out the router alone")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
