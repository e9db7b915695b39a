"""More requests than the cluster can serve: what is still served in time, and how the others are told (DESIGN §4.3).

    python -m benchmarks.overload [--seconds 30] [--slo 2] [--set key=value]

Two prefill and two decode workers of the tracer model, whose steps take a modelled time; everything else is real:
router, tokenising, streams, blocks over NIXL.

1. capacity   as many requests at a time as the decode pool holds, and some more: requests per second
2. loads      open loops at 0.5 to 3 times that, each on the same cluster, which is quiet again before the next
Goodput: requests whose first token came within the SLO and which ended well, per second of the load. The router's
queue and memory are read four times a second.
"""

import argparse
import asyncio
import random
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
from benchmarks.pictures import leave_pictures
from benchmarks.report import head, number, publish
from benchmarks.setups import Setup, status_of, wait_serving
from benchmarks.timeline import Timeline, percentile
from benchmarks.workloads import Ask, Writer, poisson
from cluster.config import load_config
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError
from cluster.local import LocalCluster

RESULTS = Path(__file__).with_name("results")
TIMES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
PROMPTS, OUTPUTS = (64, 128, 256, 512), (16, 32, 64)
SETTINGS = (
    "model=tracer",
    "name=overload",
    "pools.prefill.replicas=2",
    "pools.decode.replicas=2",
    "engine.pool_tokens=4096",
    "engine.max_batch=8",
    "engine.tracer.step_s=0.03",
    "engine.tracer.token_s=0.0002",
    "router.http_port=0",
    "router.grpc_port=0",
    "log_level=warning",
)
TOGETHER = 32
LOOK_S = 0.25
READY_S = 120.0
MB = 1e6
_WRITER = Writer(per_byte=True)


@dataclass(frozen=True, slots=True)
class Point:
    """One load. Times in milliseconds, rates per second, memory in MB."""

    times: float
    sent: int
    rate: float
    ok: int
    refused: int
    failed: int
    goodput: float
    ttft_p50: float | None
    ttft_p99: float | None
    refusal_p50: float | None
    refusal_p99: float | None
    late_refusals: int  # after more than 50 ms
    retry_after: float | None
    longest_queue: int
    queued_tokens: int
    rss: float


@dataclass(slots=True)
class Watch:
    """The greatest values seen at the router during a load."""

    queued: int = 0
    tokens: int = 0
    rss: float = 0.0


def draw(rng: random.Random, times: Sequence[float]) -> list[Ask]:
    """A request of some length at each of these times; no two prompts are alike."""
    return [Ask("chat", _WRITER.prompt(rng, rng.choice(PROMPTS)), rng.choice(OUTPUTS), at) for at in times]


def point(times: float, seconds: float, slo_s: float, timelines: Sequence[Timeline], seen: Watch) -> Point:
    """The figures of one load."""
    served = [t for t in timelines if t.ok]
    refused = [t for t in timelines if t.status == 429]
    ttft = [t.ttft * 1000 for t in served]
    told = [(t.ended - t.sent) * 1000 for t in refused]
    return Point(
        times=times,
        sent=len(timelines),
        rate=len(timelines) / seconds,
        ok=len(served),
        refused=len(refused),
        failed=len(timelines) - len(served) - len(refused),
        goodput=sum(t.ttft <= slo_s for t in served) / seconds,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        refusal_p50=percentile(told, 50),
        refusal_p99=percentile(told, 99),
        late_refusals=sum(ms > 50 for ms in told),
        retry_after=percentile([t.retry_after for t in refused if t.retry_after is not None], 50),
        longest_queue=seen.queued,
        queued_tokens=seen.tokens,
        rss=seen.rss,
    )


class Overload:
    """Runs the loads on one cluster."""

    def __init__(self, cluster: LocalCluster, client: HttpClient, admin: HttpClient, clock: Clock) -> None:
        self._router = psutil.Process(cluster.ready("router-0").pids[0])
        self._setup = Setup("overload", cluster)
        self._client = client
        self._admin = admin
        self._clock = clock

    async def capacity(self, requests: int) -> float:
        """Requests per second while always some wait."""
        asks = draw(random.Random("capacity"), [0.0] * requests)
        await closed_loop(self._client, asks[:TOGETHER], TOGETHER)  # warm
        load = await closed_loop(self._client, asks, TOGETHER)
        ends = sorted(t.ended for t in load.timelines if t.ok)
        first, last = (
            len(ends) // 4,
            3 * len(ends) // 4,
        )  # neither the first ones, which all begin at once, nor the rest
        return (last - first) / (ends[last] - ends[first])

    async def at(self, times: float, rate: float, seconds: float, slo_s: float) -> Point:
        """One open loop, and quiet afterwards."""
        rng = random.Random(f"overload/{times}")
        seen = Watch()
        looking = asyncio.create_task(self._look(seen))
        load = await open_loop(self._client, draw(rng, poisson(rate, seconds, rng)), self._clock)
        looking.cancel()
        await wait_serving(self._setup, self._client, self._clock)
        return point(times, seconds, slo_s, load.timelines, seen)

    async def _look(self, seen: Watch) -> None:
        while True:
            gauges = (await status_of(self._admin))["gauges"]
            seen.queued = max(seen.queued, gauges["queued"])
            seen.tokens = max(seen.tokens, gauges["queued_tokens"])
            seen.rss = max(seen.rss, self._router.memory_info().rss / MB)
            await asyncio.sleep(LOOK_S)


async def measure(
    seconds: float, slo_s: float, loads: Sequence[float], settings: Sequence[str], clock: Clock
) -> tuple[float, list[Point]]:
    """Capacity, and a point for each load. Raises Unavailable, ConfigError."""
    config = load_config(None, [*SETTINGS, f"router.slo_ttft_s={slo_s}", *settings])
    with tempfile.TemporaryDirectory() as folder, LocalCluster(config, Path(folder)) as cluster:
        await asyncio.to_thread(cluster.wait_ready, READY_S)
        async with (
            HttpClient(cluster.url, config.model_name, clock) as client,
            HttpClient(cluster.admin_url, "", clock) as admin,
        ):
            await wait_serving(Setup("overload", cluster), client, clock)
            run = Overload(cluster, client, admin, clock)
            capacity = await run.capacity(round(seconds * 4))
            return capacity, [await run.at(times, times * capacity, seconds, slo_s) for times in loads]


def markdown(capacity: float, slo_s: float, points: Sequence[Point], machine: dict[str, str]) -> str:
    """The table."""
    peak, most = max(p.goodput for p in points), points[-1]
    lines = ["# Overload: two prefill and two decode workers, modelled steps", ""]
    lines += head(machine)
    lines += [
        f"- capacity {number(capacity)} requests/s; SLO: first token within {slo_s:g} s",
        f"- goodput at {most.times:g} times capacity: {number(100 * most.goodput / peak)} % of its peak",
        "",
        "| load | sent/s | served | refused | failed | goodput/s | TTFT p50, ms | p99 | refused in p50, ms "
        "| p99 | over 50 ms | Retry-After p50, s | queue, requests | tokens | router RSS, MB |",
        "| --- " * 15 + "|",
    ]
    for p in points:
        cells = (p.rate, p.ok, p.refused, p.failed, p.goodput, p.ttft_p50, p.ttft_p99, p.refusal_p50, p.refusal_p99)
        rest = (p.late_refusals, p.retry_after, p.longest_queue, p.queued_tokens, p.rss)
        lines.append(f"| {p.times:g} x | {' | '.join(map(number, (*cells, *rest)))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code: 0, or 1 when it could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=TIMES, help="in parts of the capacity")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.overload")
    try:
        capacity, points = uvloop.run(measure(options.seconds, options.slo, options.loads, options.set, clock))
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    text = markdown(capacity, options.slo, points, machine)
    document = {"machine": machine, "capacity": capacity, "slo_s": options.slo, "points": [asdict(p) for p in points]}
    publish(options.out, stem := f"{today(clock)}-tracer-overload", text, document)
    leave_pictures(options.out / f"{stem}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
