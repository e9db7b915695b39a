"""One comparison: stage by stage, its set-ups are started and take each turn one after the other (A B C, A B C ...)."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Run
from benchmarks.figures import Figures, run_figures
from benchmarks.load import Load, closed_loop, open_loop
from benchmarks.peers import plan
from benchmarks.peers.aims import MEGABYTES, RATE
from benchmarks.peers.plan import Search, Size, Stage, probe, stages, turns
from benchmarks.peers.report import Outcome
from benchmarks.peers.subjects import GONE, Subject, Vllm, headrace, library, share_cores, vllm
from benchmarks.samples import pack
from benchmarks.setups import AGGREGATED, SPLIT, Setup, cpu_of, make_cluster, pinned
from benchmarks.workloads import Ask, Workload, Writer, draw
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable

READY_S = 300.0
OURS = {
    plan.SPLIT: (SPLIT, ()),
    plan.AGGREGATED: (AGGREGATED, ()),
    plan.INT8: (AGGREGATED, ("name=int8", "engine.quantization=int8")),
}
SHOWN = 300  # of why a peer is absent, in the page
CLIENT = "client"
Peer = tuple[str, AbstractAsyncContextManager[Subject]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What every system gets, one after the other."""

    work: Workload
    seed: int
    repetition: int


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. `settings`: key=value for Headrace. `libraries`: name -> its Python and its weights.

    `works` and `only`: names of works and of systems; empty for all.
    """

    model: str
    size: Size
    works: Sequence[str] = ()
    only: Sequence[str] = ()
    settings: Sequence[str] = ()
    vllm: Vllm | None = None
    libraries: Mapping[str, tuple[Path, Path]] | None = None


class SideBySide:
    """Runs it. `outcome` grows meanwhile, so that what was measured is there when it is stopped."""

    def __init__(self, options: Options, outcome: Outcome, clock: Clock) -> None:
        self._options = options
        self._outcome = outcome
        self._clock = clock
        self._cores = share_cores(plan.CORES)
        self._writer = Writer()

    async def run(self) -> None:
        """Raises Unavailable, ConfigError, ModelError for Headrace; a peer that fails is absent."""
        for number, stage in enumerate(stages(self._options.size, self._options.works)):
            async with self._subjects(stage) as subjects:
                await self._stage(stage, number, subjects)

    @asynccontextmanager
    async def _subjects(self, stage: Stage) -> AsyncIterator[list[Subject]]:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as clusters:
            setups = {}
            for name, (kind, settings) in OURS.items():
                if self._wanted(stage, name):
                    print(f"{stage.name}: starting {name} ...", flush=True)
                    given = (*self._options.settings, *settings)
                    cluster = make_cluster(kind, self._options.model, given, Path(folder) / name.replace(" ", "-"))
                    setups[name] = Setup(name, clusters.enter_context(cluster))
            for setup in setups.values():
                await asyncio.to_thread(setup.cluster.wait_ready, READY_S)
            async with AsyncExitStack() as stack:
                with pinned(list(setups.values())):
                    ours = [headrace(setup, name, self._clock) for name, setup in setups.items()]
                    found = [await stack.enter_async_context(one) for one in ours]
                    for name, peer in self._peers(stage):
                        print(f"{stage.name}: starting {name} ...", flush=True)
                        try:
                            subject = await stack.enter_async_context(peer)
                        except Unavailable as error:
                            self._lost(name, str(error))
                            continue
                        subject.rest_while(idle=True)
                        found.append(subject)
                    yield found

    def _peers(self, stage: Stage) -> Iterator[Peer]:
        """Those that are wanted and given, not started yet."""
        how, tuned = self._options.vllm, stage.name == plan.INTERFERENCE
        for name in (plan.VLLM_SPLIT, plan.VLLM_AGGREGATED):
            if how is not None and self._wanted(stage, name):
                yield name, vllm(name, how, self._cores, self._clock, tuned)
        for name, (python, weights) in (self._options.libraries or {}).items():
            if self._wanted(stage, name):
                yield name, library(name, python, weights, self._cores.workers[0], self._clock)

    def _wanted(self, stage: Stage, name: str) -> bool:
        chosen = not self._options.only or name in self._options.only
        return chosen and any(stage.doers(work, [name]) for work in stage.works)

    def _lost(self, name: str, why: str) -> None:
        print(f"{name} is absent: {why}", flush=True)
        self._outcome.absent[name] = " ".join(why.split())[-SHOWN:]

    async def _stage(self, stage: Stage, number: int, subjects: list[Subject]) -> None:
        for subject in list(subjects):
            await self._warm_up(stage, subject, subjects)
        for work in stage.works:
            if work.name == plan.CAPACITY:
                for seed in self._options.size.seeds[: self._options.size.searches]:
                    await self._search(stage, work, seed, subjects)
                continue
            for seed, repetition in turns(self._options.size):
                for name in stage.doers(work, [subject.name for subject in subjects]):
                    run = await self._take(Turn(work, seed, repetition), name, subjects)
                    self._outcome.runs += [] if run is None else [run]
        for subject in subjects:
            with suppress(*GONE):
                figures: Figures = {MEGABYTES: subject.memory_mb()}
                self._outcome.runs.append(Run(plan.MEMORY, subject.name, 0, number, 0.0, figures, {}, []))

    async def _warm_up(self, stage: Stage, subject: Subject, subjects: list[Subject]) -> None:
        """Not counted: every worker computes a short and a long prompt. Who cannot is absent."""
        longest = max(max(work.prompt_tokens, work.long_prompt_tokens * bool(work.long_rate)) for work in stage.works)
        print(f"{stage.name}: warming {subject.name} up ...", flush=True)
        for number, tokens in enumerate((64, longest)):
            count = len(subject.workers)
            work = Workload(f"warm {subject.name}", tokens, 8, concurrency=count, count=count)
            run = await self._take(Turn(work, number, 0), subject.name, subjects)
            if run is not None and run.errors:
                subjects.remove(subject)
                self._lost(subject.name, f"a warm-up request failed: {run.errors[0]}")
            if subject not in subjects:
                return

    async def _search(self, stage: Stage, work: Workload, seed: int, subjects: list[Subject]) -> None:
        """The highest rate that each serves, a probe of each in turn."""
        searches = {name: Search() for name in stage.doers(work, [subject.name for subject in subjects])}
        while trying := {name: rate for name, search in searches.items() if (rate := search.rate) is not None}:
            for name, rate in trying.items():
                run = await self._take(Turn(probe(work, rate), seed, 0), name, subjects)
                if run is None:
                    del searches[name]
                    continue
                self._outcome.probes.append(run)
                served = (run.figures["attainment"] or 0.0) >= plan.ATTAINED
                searches[name] = searches[name].told(rate, served)
        for name, search in searches.items():
            self._outcome.runs.append(Run(work.name, name, seed, 0, 0.0, {RATE: search.low or 0.0}, {}, []))

    async def _take(self, turn: Turn, name: str, subjects: list[Subject]) -> Run | None:
        """One turn of one system, while all others rest. None: a process of it is gone, so it left `subjects`."""
        [subject] = [one for one in subjects if one.name == name]
        asks = draw(turn.work, turn.seed, turn.repetition, self._writer)
        try:
            subject.rest_while(idle=False)
            before, start = self._cpu(subjects), self._clock.now()
            load = await self._load(turn.work, asks, subject)
            seconds = self._clock.now() - start
            cpu = {one: (used - before[one]) / seconds for one, used in self._cpu(subjects).items()}
            subject.rest_while(idle=True)
        except GONE:
            subjects.remove(subject)
            self._lost(name, f"a process of it ended during {turn.work.name}")
            return None
        figures = run_figures(load.timelines, load.lags, plan.SLO)
        if turn.work.concurrency is not None:  # the SLO is that of chats
            figures = {key: value for key, value in figures.items() if key not in ("attainment", "goodput")}
        figures |= {"cpu": cpu[name], "cpu_idle": sum(cpu.values()) - cpu[name] - cpu[CLIENT]}
        errors = [timeline.error for timeline in load.timelines if timeline.error is not None]
        samples = pack(load.timelines, start)
        run = Run(turn.work.name, name, turn.seed, turn.repetition, seconds, figures, cpu, errors, samples)
        _say(run)
        return run

    async def _load(self, work: Workload, asks: Sequence[Ask], subject: Subject) -> Load:
        if work.concurrency is None:
            return await open_loop(subject.streams, asks, self._clock)
        return await closed_loop(subject.streams, asks, work.concurrency)

    def _cpu(self, subjects: Sequence[Subject]) -> dict[str, float]:
        return {CLIENT: cpu_of(os.getpid()), **{subject.name: subject.cpu_s() for subject in subjects}}


def _say(run: Run) -> None:
    shown = ("ttft_p50", "itl_p99", "tpot_p50", "output_tok_s", "attainment")
    values = "  ".join(f"{key} {value:.2f}" for key in shown if (value := run.figures.get(key)) is not None)
    failed = f"  {len(run.errors)} failed" if run.errors else ""
    print(f"{run.workload:15} {run.setup:20} seed {run.seed}  {run.seconds:5.1f} s  {values}{failed}", flush=True)
