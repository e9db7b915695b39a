"""Placement policies against each other on real programs: two prefill and two decode workers, one cluster per policy.

    python -m benchmarks.placement_real [--chats 40] [--rate 1.5] [--policies cost,round_robin]

The model is the tracer, whose steps take a modelled time; everything else is real. Chats of TURNS turns, each prompt
being the one before and TURN tokens more, at random times that are the same for every policy (benchmarks/placement.py
asks the same of many more workers, on virtual time).
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.http_client import HttpClient
from benchmarks.load import closed_loop, open_loop
from benchmarks.machine import describe_machine, today
from benchmarks.report import head, number, publish
from benchmarks.setups import Setup, wait_serving
from benchmarks.timeline import percentile
from benchmarks.workloads import Ask, Writer
from cluster.config import load_config
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, Unavailable
from cluster.local import LocalCluster
from router.placement import POLICIES

RESULTS = Path(__file__).with_name("results")
TURNS, TURN, ANSWER = 4, 400, 8
READY_S = 120.0
SETTINGS = (
    "model=tracer",
    "name=placement",
    "pools.prefill.replicas=2",
    "pools.decode.replicas=2",
    "engine.pool_tokens=32768",
    "engine.tracer.step_s=0.01",
    "engine.tracer.token_s=0.001",
    "router.http_port=0",
    "router.grpc_port=0",
    "log_level=warning",
)
COUNTER = "headrace_cached_tokens_total "
_WRITER = Writer(per_byte=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. TTFT in ms; `cached`: share of all prompt tokens; `busy`: load average of the machine afterwards."""

    policy: str
    requests: int
    p50: float
    p99: float
    mean: float
    cached: float
    busy: float


def draw(chats: int, rate: float, rng: random.Random) -> list[Ask]:
    """Turns of all chats, `rate` per second; which chat goes on is drawn, so a chat's turns lie apart."""
    texts = [_WRITER.prompt(rng, TURN * TURNS) for _ in range(chats)]
    order = [chat for chat in range(chats) for _ in range(TURNS)]
    rng.shuffle(order)
    said, at, asks = [0] * chats, 0.0, []
    for chat in order:
        said[chat] += TURN
        at += rng.expovariate(rate)
        asks.append(Ask("chat", texts[chat][: said[chat]], ANSWER, at))
    return asks


async def measure(policy: str, chats: int, rate: float, settings: Sequence[str], clock: Clock) -> Row:
    """One policy on a cluster of its own. Raises Unavailable, ConfigError."""
    config = load_config(None, [*SETTINGS, f"router.policy={policy}", *settings])
    asks = draw(chats, rate, random.Random("placement"))
    with tempfile.TemporaryDirectory() as folder, LocalCluster(config, Path(folder)) as cluster:
        await asyncio.to_thread(cluster.wait_ready, READY_S)
        async with (
            HttpClient(cluster.url, config.model_name, clock) as client,
            HttpClient(cluster.admin_url, "", clock) as admin,
        ):
            await wait_serving(Setup(policy, cluster), client, clock)
            await closed_loop(client, draw(2, 1.0, random.Random("warm")), 4)
            before = await _cached(admin)
            load = await open_loop(client, asks, clock)
            cached = await _cached(admin) - before
    failed = [timeline.error for timeline in load.timelines if not timeline.ok]
    if failed:
        raise Unavailable(f"{policy}: {len(failed)} requests failed: {failed[0]}")
    ttft = [timeline.ttft * 1000 for timeline in load.timelines]
    return Row(
        policy=policy,
        requests=len(ttft),
        p50=percentile(ttft, 50) or 0.0,
        p99=percentile(ttft, 99) or 0.0,
        mean=statistics.fmean(ttft),
        cached=cached / sum(timeline.prompt_tokens for timeline in load.timelines),
        busy=psutil.getloadavg()[0],
    )


async def _cached(admin: HttpClient) -> float:
    """The router's count of cached positions. Raises Unavailable when it does not tell."""
    answer = await admin.get("/metrics")
    counts = [line.removeprefix(COUNTER) for line in answer.body.decode().splitlines() if line.startswith(COUNTER)]
    if not counts:
        raise Unavailable(f"/metrics answered with {answer.status}, and without {COUNTER.strip()}")
    return sum(map(float, counts))


def markdown(rows: Sequence[Row], facts: Sequence[str], machine: dict[str, str]) -> str:
    """The table."""
    lines = ["# Placement policies, two prefill and two decode workers", ""]
    lines += [*head(machine), *(f"- {fact}" for fact in facts), ""]
    lines += [
        "| policy | TTFT p50, ms | p99, ms | mean, ms | cached positions | load average after |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        cells = " | ".join(map(number, (row.p50, row.p99, row.mean)))
        lines.append(f"| {row.policy} | {cells} | {row.cached:.1%} | {number(row.busy)} |")
    order = " < ".join(row.policy for row in sorted(rows, key=lambda row: row.mean))
    return "\n".join([*lines, "", f"By mean TTFT: {order}."]) + "\n"


def main() -> int:
    """Returns the exit code: 0, or 1 when it could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement_real", description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.placement_real")
    facts = [
        f"{options.chats} chats of {TURNS} turns of {TURN} tokens, answers of {ANSWER}; {options.rate:g} requests/s",
        "model: tracer; a step takes 10 ms and 1 ms for each position",
    ]
    rows = []
    try:
        for policy in options.policies.split(","):
            rows.append(uvloop.run(measure(policy, options.chats, options.rate, options.set, clock)))
            print(rows[-1], flush=True)
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    document = {"machine": machine, "facts": facts, "rows": [asdict(row) for row in rows]}
    publish(options.out, f"{today(clock)}-tracer-placement", markdown(rows, facts, machine), document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
