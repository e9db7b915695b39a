"""What a client sees when the decode worker of its stream is gone: the longest pause between two chunks (DESIGN §6).

    python -m benchmarks.failover [--rounds 7] [--model smollm2-135m] [--set key=value]

One prefill and two decode workers. Per round, in turn:
    none   nothing happens
    kill   SIGKILL of the worker's server and engine
    stop   SIGSTOP of both; SIGCONT when the streams have ended
Two streams run, one on each decode worker; the worker of the first one is struck between two of its tokens. Prompt and
history are 256 tokens at most. Before the next one the worker is back, and warm.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.figures import MS, spread
from benchmarks.http_client import HttpClient
from benchmarks.machine import describe_machine, today
from benchmarks.report import head, publish, show
from benchmarks.setups import Setup, status_of, wait_serving, warm_up
from benchmarks.workloads import Ask, Writer
from cluster.config import load_config
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, Unavailable
from cluster.local import LocalCluster
from cluster.models.pull import pull
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache

RESULTS = Path(__file__).with_name("results")
WAYS = ("none", "kill", "stop")
PROMPT, OUTPUT = 96, 128
EARLIEST_S, LATEST_S = 0.5, 2.5  # after the first stream was placed
READY_S = 120.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds. `gap`: the longest pause of the stream on the struck worker; `other`: of the one beside it."""

    way: str
    gap: float
    other: float
    median_itl: float
    history: int  # tokens written before the strike


class Failover:
    """Runs the rounds on one cluster."""

    def __init__(
        self, cluster: LocalCluster, client: HttpClient, admin: HttpClient, writer: Writer, clock: Clock
    ) -> None:
        self._setup = Setup("failover", cluster)
        self._cluster = cluster
        self._client = client
        self._admin = admin
        self._writer = writer
        self._clock = clock
        self._random = random.Random("failover")

    async def run(self, rounds: int) -> list[Round]:
        """Every way once per round. Raises Unavailable when a stream does not end well."""
        await wait_serving(self._setup, self._client, self._clock)
        done: list[Round] = []
        for number in range(rounds):
            for way in WAYS:
                await self._recovered()
                await warm_up(self._setup, self._client, self._writer, longest=PROMPT)
                done.append(await self._round(way, f"{number}/{way}"))
                print(f"round {number + 1} {way}: {done[-1].gap * 1000:.0f} ms", flush=True)
        return done

    async def _round(self, way: str, seed: str) -> Round:
        texts = random.Random(seed)
        first = asyncio.create_task(self._client.stream(Ask("struck", self._writer.prompt(texts, PROMPT), OUTPUT)))
        victim = await self._placed()
        second = asyncio.create_task(self._client.stream(Ask("other", self._writer.prompt(texts, PROMPT), OUTPUT)))
        await asyncio.sleep(self._random.uniform(EARLIEST_S, LATEST_S))
        pids = self._cluster.ready(victim).pids
        struck = self._clock.now()
        if way != "none":
            _signal(pids, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        try:
            lines = await asyncio.gather(first, second)
        finally:
            if way == "stop":
                _signal(pids, signal.SIGCONT)
        for line in lines:
            if not line.ok or line.output_tokens != OUTPUT:
                raise Unavailable(f"{way}: a stream ended with {line.error}, {line.output_tokens} of {OUTPUT} tokens")
        gaps = [[end - start for start, end in line.gaps] for line in lines]
        history = sum(chunk < struck for chunk in lines[0].chunks)
        return Round(way, max(gaps[0]), max(gaps[1]), statistics.median(gaps[0] + gaps[1]), history)

    async def _placed(self) -> str:
        """The decode worker that has an attempt."""
        give_up = self._clock.now() + READY_S
        while self._clock.now() < give_up:
            workers = (await status_of(self._admin))["workers"]
            busy = [w["worker"] for w in workers if w["role"] == "decode" and w["attempts"]]
            if busy:
                return str(busy[0])
            await asyncio.sleep(LOOK_S)
        raise Unavailable("the stream was not placed")

    async def _recovered(self) -> None:
        give_up = self._clock.now() + READY_S
        while self._clock.now() < give_up:
            workers = (await status_of(self._admin))["workers"]
            if [w["state"] for w in workers] == ["ready"] * 3 and not any(w["attempts"] for w in workers):
                return
            await asyncio.sleep(LOOK_S)
        raise Unavailable(f"not every worker is ready again: {workers}")


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


async def measure(model: str, rounds: int, settings: Sequence[str], clock: Clock) -> list[Round]:
    """Start the cluster and run. Raises Unavailable, ConfigError, ModelError."""
    pools = ("pools.prefill.replicas=1", "pools.decode.replicas=2", "router.http_port=0", "router.grpc_port=0")
    config = load_config(None, [f"model={model}", "name=failover", *pools, *settings])
    with tempfile.TemporaryDirectory() as folder, LocalCluster(config, Path(folder)) as cluster:
        await asyncio.to_thread(cluster.wait_ready, READY_S)
        async with (
            HttpClient(cluster.url, config.model_name, clock) as client,
            HttpClient(cluster.admin_url, "", clock) as admin,
        ):
            return await Failover(cluster, client, admin, Writer(per_byte=model == "tracer"), clock).run(rounds)


def markdown(rounds: Sequence[Round], machine: dict[str, str]) -> str:
    """The table. Milliseconds; median, least and greatest over the rounds."""
    lines = ["# Pause of a stream whose decode worker is gone", ""]
    lines += head(machine)
    lines += [
        f"- {PROMPT} prompt tokens, {OUTPUT} written; struck {EARLIEST_S:g} to {LATEST_S:g} s after the stream began",
        "",
        "| | longest pause of the struck stream | of the one beside it | median ITL | history at the strike | rounds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, words in zip(WAYS, ("no fault", "SIGKILL", "SIGSTOP"), strict=True):
        those = [each for each in rounds if each.way == way]
        cells = [show(spread(getattr(each, key) * MS for each in those)) for key in ("gap", "other", "median_itl")]
        cells.append(show(spread(each.history for each in those)))
        lines.append(f"| {words} | {' | '.join(cells)} | {len(those)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code: 0, or 1 when it could not be run or a stream failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a Hugging Face folder, or tracer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.failover")
    try:
        if options.model in KNOWN_MODELS:
            pull(options.model, default_cache())
        rounds = uvloop.run(measure(options.model, options.rounds, options.set, clock))
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    text = markdown(rounds, machine)
    stem = f"{today(clock)}-{options.model.rsplit('/', 1)[-1]}-failover"
    publish(options.out, stem, text, {"machine": machine, "rounds": [asdict(each) for each in rounds]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
