"""One benchmark: the router alone, then both set-ups started and every workload on each in turn.

for each workload, seed and round:   split, aggregated, split, aggregated, ...
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import Figures, run_figures
from benchmarks.http_client import HttpClient
from benchmarks.load import closed_loop, open_loop
from benchmarks.overhead import measure_overhead
from benchmarks.samples import Packed, pack
from benchmarks.setups import (
    AGGREGATED,
    SPLIT,
    Setup,
    cpu_seconds,
    make_cluster,
    pinned,
    wait_serving,
    warm_up,
)
from benchmarks.timeline import Slo
from benchmarks.workloads import Ask, Profile, Workload, Writer, draw
from cluster.core.clock import Clock

NAMES = (SPLIT, AGGREGATED)


@dataclass(frozen=True, slots=True)
class Turn:
    """What both set-ups get, one after the other."""

    workload: Workload
    seed: int
    repetition: int
    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Run:
    """One turn on one set-up. `cpu`: share of a core that each process used meanwhile. `samples`: see samples.py."""

    workload: str
    setup: str
    seed: int
    repetition: int
    seconds: float
    figures: Figures
    cpu: dict[str, float]
    errors: list[str]
    samples: list[Packed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, on what. `settings` are key=value of the cluster's configuration, for both set-ups."""

    profile: Profile
    model: str
    settings: Sequence[str] = ()
    slo: Slo = field(default_factory=Slo)
    overhead: bool = True


@dataclass(slots=True)
class Outcome:
    """Everything measured."""

    runs: list[Run] = field(default_factory=list)
    overhead: Figures = field(default_factory=dict)
    pinning: str = ""


class Bench:
    """Runs a plan. `say` is told what happens."""

    def __init__(self, plan: Plan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._writer = Writer(per_byte=plan.model == "tracer")
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Raises Unavailable, ConfigError, ModelError."""
        if self._plan.overhead:
            print("router overhead ...", flush=True)
            requests = self._plan.profile.overhead_requests
            self.outcome.overhead = await measure_overhead(self._plan.model, requests, self._clock)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as clusters:
            setups = [self._start(name, Path(folder) / name, clusters) for name in NAMES]
            for setup in setups:
                await asyncio.to_thread(setup.cluster.wait_ready, 180.0)
            with pinned(setups) as self.outcome.pinning:
                await self._workloads(setups)
        return self.outcome

    def _start(self, name: str, folder: Path, clusters: ExitStack) -> Setup:
        print(f"starting {name} ...", flush=True)
        cluster = make_cluster(name, self._plan.model, self._plan.settings, folder)
        return Setup(name, clusters.enter_context(cluster))

    async def _workloads(self, setups: Sequence[Setup]) -> None:
        async with AsyncExitStack() as stack:
            clients: dict[str, HttpClient] = {}
            for setup in setups:
                name = setup.cluster.config.model_name
                client = HttpClient(setup.cluster.url, name, self._clock)
                clients[setup.name] = await stack.enter_async_context(client)
                await wait_serving(setup, client, self._clock)
                await warm_up(setup, client, self._writer, longest=1500)
            for workload in self._plan.profile.workloads:
                for seed in self._plan.profile.seeds:
                    for repetition in range(self._plan.profile.rounds):
                        asks = draw(workload, seed, repetition, self._writer)
                        turn = Turn(workload, seed, repetition, asks)
                        for setup in setups:
                            self._keep(await self._take(turn, setup, clients[setup.name], setups))

    async def _take(self, turn: Turn, setup: Setup, client: HttpClient, setups: Sequence[Setup]) -> Run:
        before, start = cpu_seconds(setups), self._clock.now()
        if turn.workload.concurrency is None:
            load = await open_loop(client, turn.asks, self._clock)
        else:
            load = await closed_loop(client, turn.asks, turn.workload.concurrency)
        seconds = self._clock.now() - start
        cpu = {what: (used - before[what]) / seconds for what, used in cpu_seconds(setups).items()}
        figures = run_figures(load.timelines, load.lags, self._plan.slo)
        errors = [t.error for t in load.timelines if t.error is not None]
        samples = pack(load.timelines, start)
        return Run(turn.workload.name, setup.name, turn.seed, turn.repetition, seconds, figures, cpu, errors, samples)

    def _keep(self, run: Run) -> None:
        self.outcome.runs.append(run)
        shown = ("ttft_p50", "itl_p50", "itl_p99", "tpot_p50", "output_tok_s")
        values = "  ".join(f"{key} {value:.1f}" for key in shown if (value := run.figures[key]) is not None)
        head = f"{run.workload:13} {run.setup:11} seed {run.seed} round {run.repetition}"
        print(f"{head}  {run.seconds:5.1f} s  {values}", flush=True)
