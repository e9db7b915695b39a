"""Router overhead: a request through the router minus the same request sent straight to a worker that answers at once.

    direct   our own session to the worker (proto/session.proto), as the router opens it
    http     /v1/completions, streamed                     grpc   Inference.Generate
Latency is taken with one request at a time, the three in turn; per token with an answer whose tokens come one message
each. Throughput is 64 requests at a time of 32 tokens in one message, as others measure their routers. Processor time
is the router process's own.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.figures import MS, Figures
from benchmarks.http_client import HttpClient
from benchmarks.load import closed_loop
from benchmarks.setups import Setup, wait_serving
from benchmarks.timeline import percentile
from benchmarks.workloads import Ask
from cluster.config import load_config
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable
from cluster.core.ids import new_epoch
from cluster.core.protocol import PROTOCOL
from cluster.credentials import Credentials
from cluster.local import LocalCluster
from cluster.rpc import channel, check_answer, proof_metadata
from cluster.secret import cluster_secret
from cluster.stubs.inference_pb2 import GenerateRequest
from cluster.stubs.inference_pb2_grpc import InferenceStub
from cluster.stubs.session_pb2 import FromDecode, FromRouter, RouterHello, SampleState, Submit
from cluster.stubs.session_pb2_grpc import SessionStub

PROMPT = "hello there, how are you today?"
TOKENS = 32
CONCURRENCY = 64
WARM = 20
Send = Callable[[int], Awaitable[float]]  # output tokens -> seconds until the end


@dataclass(frozen=True, slots=True)
class Bench:
    """A router in front of an instant worker."""

    cluster: LocalCluster
    clock: Clock
    model: str

    def router_cpu(self) -> float:
        """Processor seconds of the router so far."""
        times = psutil.Process(self.cluster.ready("router-0").pids[0]).cpu_times()
        return float(times.user + times.system)


async def measure_overhead(model: str, requests: int, clock: Clock) -> Figures:
    """All figures of the router. Milliseconds unless the key says otherwise. Raises Unavailable."""
    figures: Figures = {}
    for module, measure in (("one_by_one", _latencies), ("at_once", _throughput)):
        with tempfile.TemporaryDirectory() as folder:
            settings = ("router.http_port=0", "router.grpc_port=0", "log_level=warning", "pools.prefill.replicas=0")
            config = load_config(None, [f"model={model}", "name=overhead", *settings, "pools.decode.replicas=0"])
            with LocalCluster(config, Path(folder)) as cluster:
                cluster.start("decode-0", f"benchmarks.instant.{module}")
                await asyncio.to_thread(cluster.wait_ready)
                async with HttpClient(cluster.url, config.model_name, clock) as client:
                    await wait_serving(Setup("overhead", cluster), client, clock)
                    figures |= await measure(Bench(cluster, clock, config.model_name), client, requests)
    return figures


async def _latencies(bench: Bench, client: HttpClient, requests: int) -> Figures:
    """One request at a time, of 1 token and of TOKENS, over the three ways in turn."""
    ways = ("direct", "http", "grpc")
    seconds: dict[tuple[str, int], list[float]] = {(way, n): [] for way in ways for n in (1, TOKENS)}
    cpu: dict[tuple[str, int], float] = dict.fromkeys(seconds, 0.0)
    async with AsyncExitStack() as stack:
        direct, grpc_way = await _direct(bench, stack), await _grpc(bench, stack)
        senders: dict[str, Send] = {"direct": direct, "http": _http(client), "grpc": grpc_way}
        for send in senders.values():
            for _ in range(WARM):
                await send(TOKENS)
        for _ in range(max(1, requests // 25)):
            for way, send in senders.items():
                for tokens in (1, TOKENS):
                    before = bench.router_cpu()
                    seconds[way, tokens] += [await send(tokens) for _ in range(25)]
                    cpu[way, tokens] += bench.router_cpu() - before
    figures: Figures = {}
    for (way, tokens), values in seconds.items():
        figures[f"{way}_{tokens}_p50"] = _ms(values, 50)
        figures[f"{way}_{tokens}_p99"] = _ms(values, 99)
    for way in ways[1:]:
        added = {n: _ms(seconds[way, n], 50) - _ms(seconds["direct", n], 50) for n in (1, TOKENS)}
        spent = {n: cpu[way, n] / len(seconds[way, n]) * MS for n in (1, TOKENS)}
        figures[f"{way}_per_request"] = added[1]
        figures[f"{way}_per_token"] = (added[TOKENS] - added[1]) / (TOKENS - 1)
        figures[f"{way}_cpu_per_token"] = (spent[TOKENS] - spent[1]) / (TOKENS - 1)
        figures[f"{way}_cpu_per_request"] = spent[1]
    return figures


async def _throughput(bench: Bench, client: HttpClient, requests: int) -> Figures:
    """CONCURRENCY at a time over HTTP: requests/s, and what each costs the router and this client."""
    ask = Ask("chat", PROMPT, TOKENS)
    await closed_loop(client, [ask] * CONCURRENCY, CONCURRENCY)
    own, router, start = _own_cpu(), bench.router_cpu(), bench.clock.now()
    load = await closed_loop(client, [ask] * (4 * requests), CONCURRENCY)
    seconds = bench.clock.now() - start
    own, router = _own_cpu() - own, bench.router_cpu() - router
    done = [t for t in load.timelines if t.ok]
    if not done:
        raise Unavailable(f"no request of {len(load.timelines)} came through: {load.timelines[0].error}")
    return {
        "load_failed": float(len(load.timelines) - len(done)),
        "load_requests_s": len(done) / seconds,
        "load_tok_s": sum(t.output_tokens for t in done) / seconds,
        "load_p50": _ms([t.e2e for t in done], 50),
        "load_p99": _ms([t.e2e for t in done], 99),
        "load_router_cpu": router / len(done) * MS,
        "load_client_cpu": own / len(done) * MS,
    }


def _ms(seconds: list[float], percent: float) -> float:
    value = percentile(seconds, percent)
    if value is None:
        raise Unavailable("nothing was measured")
    return value * MS


def _own_cpu() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _http(client: HttpClient) -> Send:
    async def send(tokens: int) -> float:
        timeline = await client.stream(Ask("chat", PROMPT, tokens))
        if not timeline.ok or timeline.output_tokens != tokens:
            raise Unavailable(f"HTTP: {timeline.error or 'other than the tokens asked for'}")
        return timeline.e2e

    return send


async def _grpc(bench: Bench, stack: AsyncExitStack) -> Send:
    connection = await stack.enter_async_context(channel(bench.cluster.grpc_address))
    stub = InferenceStub(connection)

    async def send(tokens: int) -> float:
        request = GenerateRequest(prompt=PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
        start = end = bench.clock.now()
        got = 0
        async for response in stub.Generate(request):
            if response.WhichOneof("event") == "delta":
                end = bench.clock.now()
                got += len(response.delta.token_ids)
        if got != tokens:
            raise Unavailable(f"gRPC: {got} tokens, not {tokens}")
        return end - start

    return send


async def _direct(bench: Bench, stack: AsyncExitStack) -> Send:
    """A session of our own, straight to the worker."""
    address = bench.cluster.ready("decode-0").address
    proof = Credentials(cluster_secret(bench.cluster.config)).proof(address)
    connection = await stack.enter_async_context(channel(address))
    call = SessionStub(connection).Open(None, metadata=proof_metadata(proof))
    stack.callback(call.cancel)
    await check_answer(call, proof)
    await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1, protocol=PROTOCOL)))
    numbers = iter(range(1 << 30))
    prompt = list(range(300, 308))

    async def send(tokens: int) -> float:
        attempt = f"direct-{next(numbers)}"
        submit = Submit(
            attempt=attempt, prompt=prompt, samples=[SampleState()], max_tokens=tokens, ignore_eos=True, deadline_s=60
        )
        start = bench.clock.now()
        await call.write(FromRouter(submit=submit))
        got = 0
        while got < tokens:
            message = await call.read()
            if not isinstance(message, FromDecode):
                raise Unavailable("the worker ended the session")
            runs = (run for each in message.batch or (message,) for run in each.tokens.runs)
            got += sum(len(run.ids) for run in runs if run.attempt == attempt)
        return bench.clock.now() - start

    return send
