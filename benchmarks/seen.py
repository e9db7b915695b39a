"""`python -m benchmarks.seen`: what it costs the router to be seen, measured in turns: A B C D E, E D C B A, ...

    unseen      nothing is counted: no metrics, no dashboard, no traces (benchmarks/instant/unseen.py)
    metrics     metrics are on, as always; dashboard and traces are off
    dashboard   the dashboard is on as well, as by default; nobody looks at it
    watched     /metrics and the dashboard's data are asked for once a second
    traced      metrics, and every call is traced and sent to a collector; no dashboard
All have an instant worker. Routers share one core and take turns on it; the client and the workers have the others.
Processor time is that of the router's process. Ratios are taken within a round, so that what the machine does meanwhile
is in both sides, and the median over rounds is what counts; in brackets the middle half of the rounds, in square ones
where that median lies with 95 % confidence (bootstrap over rounds): a share that lies in there is not resolved.
"In a loop" is what the observing itself takes without a router around it, which no neighbour disturbs as much: all that
is observed of a request, beside nothing; its share is of a request's processor time, unseen.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.http_client import HttpClient
from benchmarks.instant.unseen import UnseenMetrics
from benchmarks.load import closed_loop
from benchmarks.machine import describe_machine, today
from benchmarks.processes import PROMPT
from benchmarks.report import head, publish
from benchmarks.router import share_cores
from benchmarks.router_peers import MODEL, Door, headrace
from benchmarks.workloads import Ask
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, Unavailable
from router.front.dashboard.paths import DATA
from router.front.metrics import FrontMetrics
from router.front.recent import Recent
from router.front.usage import Usage
from router.requests import Trace

RESULTS = Path(__file__).with_name("results")
UNSEEN, METRICS, DASHBOARD, WATCHED, TRACED = SETUPS = ("unseen", "metrics", "dashboard", "watched", "traced")
BASES = {METRICS: UNSEEN, DASHBOARD: METRICS, WATCHED: DASHBOARD, TRACED: METRICS}
AIM = 0.02  # of the router's processor time, for METRICS
TOKENS = 32
MANY = 64
WARM = 128
LOOK_S = 1.0
RESAMPLES = 5000
Sample = dict[str, float]
Rounds = Sequence[Mapping[str, Sample]]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run: `requests` a turn, before an instant worker of benchmarks/instant."""

    model: str
    worker: str
    rounds: int
    requests: int


async def measure(options: Options, clock: Clock) -> Rounds:
    """Every set-up's figures, round by round. Raises Unavailable."""
    cores = share_cores()
    os.sched_setaffinity(0, set(cores.others))  # for the children
    async with contextlib.AsyncExitStack() as stack:
        doors, collector = {}, await stack.enter_async_context(_collector())
        for name in SETUPS:
            settings: tuple[str, ...] = ("router.dashboard=false",) if name in (UNSEEN, METRICS, TRACED) else ()
            if name == TRACED:
                told = (f"otlp_endpoint={collector}", "insecure=true", "sample_share=1.0")
                settings += tuple(f"tracing.{each}" for each in told)
            entry = "benchmarks.instant.unseen" if name == UNSEEN else None
            made = headrace(name, options.worker, options.model, cores, clock, settings=settings, router=entry)
            doors[name] = await stack.enter_async_context(made)
        rounds = []
        for number in range(options.rounds):
            turns = SETUPS if number % 2 == 0 else SETUPS[::-1]
            found = {name: await _turn(name, doors[name], options, clock) for name in turns}
            rounds.append(found)
            line = ", ".join(f"{name} {found[name]['cpu_ms']:.3f} ms" for name in SETUPS)
            print(f"round {number + 1}: {line}", file=sys.stderr)
        return rounds


async def _turn(name: str, door: Door, options: Options, clock: Clock) -> Sample:
    ask = Ask("chat", PROMPT, TOKENS)
    async with HttpClient(f"http://127.0.0.1:{door.port}", MODEL, clock) as client:
        await closed_loop(client, [ask] * WARM, MANY)
        looking: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if name == WATCHED:
            looking = _watched(door, clock)
        async with looking:
            cpu, start = door.cpu_s(), clock.now()
            load = await closed_loop(client, [ask] * options.requests, MANY)
            seconds, cpu = clock.now() - start, door.cpu_s() - cpu
    wrong = [t for t in load.timelines if not t.ok or t.output_tokens != TOKENS]
    if wrong:
        raise Unavailable(f"{name}: {len(wrong)} of {options.requests} answers were wrong: {wrong[0].error}")
    return {"cpu_ms": 1000 * cpu / options.requests, "req_s": options.requests / seconds}


class _Sink(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Takes whatever it is sent, and answers with an empty message."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def take(_: bytes, context: object) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


@contextlib.asynccontextmanager
async def _collector() -> AsyncIterator[str]:
    """The address of a collector of traces, in the client's process."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Sink(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _watched(door: Door, clock: Clock) -> AsyncIterator[None]:
    async def look() -> None:
        async with HttpClient(door.counts or "", MODEL, clock) as admin:
            while True:
                for path in ("/metrics", DATA):
                    if (answer := await admin.get(path)).status != 200:
                        raise Unavailable(f"{path}: {answer.status}")
                await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        (ended,) = await asyncio.gather(looking, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise Unavailable(f"nobody looked: {ended}")


def in_a_loop(metrics: FrontMetrics, clock: Clock, *, events: int, requests: int = 20_000) -> float:
    """Seconds a request for what a router observes of one that ends well, whose tokens come in so many events."""
    usage, trace = Usage(prompt=len(PROMPT), completion=TOKENS, cached=0), Trace()
    trace.timings_ms.update(dict.fromkeys(metrics.timings, 1.0))
    start = clock.now()
    for _ in range(requests):
        with metrics.call("chat") as call:
            call.follow(trace)
            for _ in range(events):
                call.tokens(0)
            call.ended([(0, TOKENS)])
            call.used(usage, 0, trace)
    return (clock.now() - start) / requests


def loop_costs(clock: Clock, worker: str) -> tuple[float, float]:
    """What metrics take of a request, and with the dashboard: seconds, beside seeing nothing. The best of five."""
    events = TOKENS if worker == "stepped" else 1
    made: list[Callable[[], FrontMetrics]] = [
        lambda: UnseenMetrics(CollectorRegistry(), clock),
        lambda: FrontMetrics(CollectorRegistry(), clock),
        lambda: FrontMetrics(CollectorRegistry(), clock, Recent()),
    ]
    nothing, metrics, dashboard = (min(in_a_loop(make(), clock, events=events) for _ in range(5)) for make in made)
    return metrics - nothing, dashboard - nothing


def costs(rounds: Rounds, name: str) -> list[float]:
    """What a set-up costs more than its base, as a share of the router's processor time, round by round."""
    return [found[name]["cpu_ms"] / found[BASES[name]]["cpu_ms"] - 1 for found in rounds]


def gains(rounds: Rounds, name: str) -> list[float]:
    """How much more it serves than its base, as a share, round by round."""
    return [found[name]["req_s"] / found[BASES[name]]["req_s"] - 1 for found in rounds]


def interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Where the median of what these are a sample of lies: a percentile bootstrap, the same one each time."""
    rng = random.Random("benchmarks.seen")
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1 - confidence) / 2)
    return medians[outside], medians[-1 - outside]


def markdown(rounds: Rounds, loop: tuple[float, float], options: Options, machine: Mapping[str, str]) -> str:
    """The table. `loop`: of `loop_costs`."""
    lines = ["# What it costs to be seen", "", *head(machine)]
    lines += [f"- worker: {options.worker}; {options.rounds} rounds of {options.requests} requests, {MANY} at a time, "
              f"{TOKENS} tokens each", ""]  # fmt: skip
    lines += ["| | CPU ms a request | requests/s | processor time beside | requests/s beside | |",
              "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name in SETUPS:
        cells = [_cell([found[name][key] for found in rounds], digits) for key, digits in (("cpu_ms", 3), ("req_s", 0))]
        beside = "- | - | "
        if name in BASES:
            beside = f"{_percent(costs(rounds, name))} | {_percent(gains(rounds, name))} | {BASES[name]}"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {beside} |")
    cost = statistics.median(costs(rounds, METRICS))
    held = "held" if cost < AIM else "NOT held"
    lines += ["", f"Metrics cost {100 * cost:.1f} % of the router's processor time: under {100 * AIM:.0f} % is {held}."]
    low, high = interval(costs(rounds, METRICS))
    resolved = "does not resolve" if low < AIM <= high else "resolves"
    lines[-1] += f" The 95 % interval of that median, {100 * low:.1f} to {100 * high:.1f} %, {resolved} it."
    whole = statistics.median(found[UNSEEN]["cpu_ms"] for found in rounds) / 1000
    metrics, dashboard = (f"{1e6 * each:.1f} us a request, {100 * each / whole:.1f} %" for each in loop)
    lines += ["", f"In a loop: metrics {metrics}; with the dashboard {dashboard}."]
    assert __doc__ is not None
    return "\n".join([*lines, "", *__doc__.split("\n", 2)[2].strip().splitlines(), ""])


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the middle half."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return statistics.median(values), low, high


def _cell(values: Sequence[float], digits: int) -> str:
    middle, low, high = (f"{value:,.{digits}f}" for value in _middle(values))
    return f"{middle} ({low} - {high})"


def _percent(shares: Sequence[float]) -> str:
    middle, low, high, least, most = (f"{100 * value:+.1f}" for value in (*_middle(shares), *interval(shares)))
    return f"{middle} % ({low} - {high}) [{least} - {most}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when it could not be run or an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seen", description="What it costs to be seen")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used; or tracer")
    parser.add_argument("--worker", choices=("at_once", "stepped"), default="at_once", help="of benchmarks/instant")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--requests", type=int, default=2000, help=f"a turn, {MANY} at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    options = Options(given.model, given.worker, given.rounds, given.requests)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.seen", arguments)
    try:
        rounds = uvloop.run(measure(options, clock))
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    loop = loop_costs(clock, options.worker)
    stem = f"{today(clock)}-seen-{options.worker.replace('_', '-')}"
    document = {"machine": machine, "rounds": rounds, "loop_s": loop}
    publish(given.out, stem, markdown(rounds, loop, options, machine), document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
