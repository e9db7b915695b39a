"""What is measured: each a context that gives a `Subject` while it runs.

headrace        the clusters of setups.py
vllm            two servers and its router; NIXL's connector between them for the split
libraries       one stream at a time, in a process of their own (one_stream.py)
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from benchmarks.http_client import HttpClient
from benchmarks.load import Streams
from benchmarks.processes import Program, family, free_port, pin, running
from benchmarks.setups import Setup, cpu_of, wait_serving
from benchmarks.timeline import Timeline
from benchmarks.workloads import Ask
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable

LABEL = "model"  # what vLLM calls it
SCRIPT = Path(__file__).with_name("one_stream.py")
KV_SPACE_GB = 2
TUNED = ("--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256")
GONE = (ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass(frozen=True, slots=True)
class Subject:
    """One system that answers. `workers`: the roots of each; `rest`: its routers. `stops`: SIGSTOP does no harm.

    Methods raise one of GONE when one of them is gone.
    """

    name: str
    streams: Streams
    workers: Sequence[Sequence[int]]
    rest: Sequence[int] = ()
    stops: bool = True

    def pids(self) -> set[int]:
        """Of all its processes now."""
        return family(pid for worker in (*self.workers, self.rest) for pid in worker)

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        return sum(cpu_of(pid) for pid in self.pids())

    def memory_mb(self) -> float:
        """Most resident memory so far of the greater worker: its processes' marks, added up."""
        return max(sum(_high_water_kb(pid) for pid in family(worker)) for worker in self.workers) / 1000

    def rest_while(self, idle: bool) -> None:
        """Stop it, or let it go on."""
        for pid in self.pids() if self.stops else ():
            os.kill(pid, signal.SIGSTOP if idle else signal.SIGCONT)


def _high_water_kb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1.024  # the kernel's kB are 1,024 bytes
    return 0.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of each worker, and where everything else runs."""

    workers: tuple[int, ...]
    others: tuple[int, ...]


def share_cores(workers: int) -> Cores:
    """Of those this process may use: the first ones are the workers'. With too few, workers share them."""
    every = sorted(os.sched_getaffinity(0))
    own = tuple(every[place % len(every)] for place in range(workers))
    return Cores(own, tuple(every[workers:]) or tuple(every))


@asynccontextmanager
async def headrace(setup: Setup, name: str, clock: Clock) -> AsyncIterator[Subject]:
    """A cluster that has been started and pinned."""
    async with HttpClient(setup.cluster.url, setup.cluster.config.model_name, clock) as client:
        await wait_serving(setup, client, clock)
        names = sorted(setup.cluster.names)
        workers = [setup.cluster.ready(one).pids for one in names if not one.startswith("router")]
        routers = [pid for one in names if one.startswith("router") for pid in setup.cluster.ready(one).pids]
        yield Subject(name, client, workers, routers, stops=False)


@dataclass(frozen=True, slots=True)
class Vllm:
    """How vLLM is started. `folder`: of its virtual environment; `router`: its router's program, `policy` of which."""

    folder: Path
    router: Path
    policy: str
    model: Path

    def serve(self, port: int, flags: Sequence[str]) -> list[str]:
        """The command of one server."""
        words = [str(self.folder / "bin" / "vllm"), "serve", str(self.model), "--host", "127.0.0.1"]
        words += ["--port", str(port), "--served-model-name", LABEL, "--dtype", "bfloat16"]
        return [*words, "--max-model-len", "4096", "--disable-uvicorn-access-log", *flags]

    def environment(self, core: int) -> dict[str, str]:
        """Its variables, for a server on that core."""
        search = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", "")])
        kv = {"VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GB), "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        return {"PATH": search, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **kv}

    def route(self, port: int, servers: Sequence[int], split: bool) -> list[str]:
        """The command of the router."""
        urls = [f"http://127.0.0.1:{server}" for server in servers]
        roles = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
        words = [str(self.router), "--host", "127.0.0.1", "--port", str(port), "--policy", self.policy]
        words += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
        words += ["--worker-startup-check-interval", "1"]
        return [*words, *(roles if split else ["--worker-urls", *urls])]


@asynccontextmanager
async def vllm(name: str, how: Vllm, cores: Cores, clock: Clock, tuned: bool) -> AsyncIterator[Subject]:
    """Two servers and a router; a name with "split" has roles. Raises Unavailable with the end of a log."""
    split = "split" in name
    async with AsyncExitStack() as stack:
        servers: list[tuple[int, Program]] = []
        for place, core in enumerate(cores.workers):
            flags = list(TUNED) if tuned and not (split and place) else []  # of the split the prefill worker alone
            env = how.environment(core)
            if split:
                flags += ["--kv-transfer-config", orjson.dumps(NIXL).decode()]
                env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            port = free_port()
            program = await stack.enter_async_context(running(how.serve(port, flags), env=env))
            servers.append((port, program))
        for port, program in servers:
            await program.answering(port, LABEL, clock)
        for (_, program), core in zip(servers, cores.workers, strict=True):
            pin(program.pid, cores.others)
            for child in family([program.pid]) - {program.pid}:
                with suppress(*GONE):  # a compiler, for example
                    pin(child, {core})
        port = free_port()
        words = how.route(port, [port for port, _ in servers], split)
        router = await stack.enter_async_context(running(words, cores.others))
        await router.answering(port, LABEL, clock)
        client = await stack.enter_async_context(HttpClient(f"http://127.0.0.1:{port}", LABEL, clock))
        workers = [[program.pid] for _, program in servers]
        yield Subject(name, client, workers, [router.pid])


class Library:
    """Asks a process that generates one stream at a time; others wait for their turn."""

    def __init__(self, process: asyncio.subprocess.Process, clock: Clock) -> None:
        self._process = process
        self._clock = clock
        self._one = asyncio.Lock()

    async def stream(self, ask: Ask) -> Timeline:
        """As HttpClient's. Never raises for what the process does."""
        async with self._one:
            sent = self._clock.now()
            line = orjson.dumps({"prompt": ask.prompt, "max_tokens": ask.max_tokens})
            assert self._process.stdin is not None
            with suppress(ConnectionError):
                self._process.stdin.write(line + b"\n")
            told = await self.read()
        if told is None:
            return Timeline(ask.kind, sent, (), error="the process has ended")
        at = [float(str(seconds)) for seconds in told["at"]] if isinstance(told["at"], list) else []
        error = None if len(at) == ask.max_tokens else f"{len(at)} tokens of {ask.max_tokens}"
        chunks = tuple(sent + seconds for seconds in at)
        return Timeline(ask.kind, sent, chunks, int(str(told["prompt_tokens"])), len(at), error)

    async def read(self) -> dict[str, object] | None:
        """The next line; None at the end."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return orjson.loads(line) if line else None


@asynccontextmanager
async def library(name: str, python: Path, weights: Path, core: int, clock: Clock) -> AsyncIterator[Subject]:
    """llama.cpp or openvino-genai, by the name's first word, with a GGUF file. Raises Unavailable."""
    command = [str(python), str(SCRIPT), name.partition(" ")[0], str(weights)]
    async with running(command, (core,), talks=True) as program:
        one = Library(program.process, clock)
        if await one.read() is None:
            raise Unavailable(f"{name} has ended: {program.tail()}")
        yield Subject(name, one, [[program.pid]])
