"""A prompt's own log-probabilities over HTTP and gRPC, from real workers: the tracer's formulas judge every number."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from engine.model.tracer import reference_logits, reference_tokens
from engine.sampler import score_row
from router.front.tokenizer import TracerTokenizer
from tests.integration.stack import BLOCK, MODEL, SPEC, HttpAnswer, Json, Stack, config, stack, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Zażółć gęślą 🌶 jaźń, and so on: " * 4
WORDS = TracerTokenizer()
RESTART_S = 90.0
ROUNDS = 5


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = config(
        decode=1,
        step_s=0.04,
        pools={"prefill": {"replicas": 2, "pool_tokens": 96 * BLOCK}, "decode": {"replicas": 1, "pool_tokens": 2048}},
        router={
            "http_port": 0, "grpc_port": 0, "deadline_s": 30.0, "local_max_tokens": BLOCK, "policy": "least_loaded",
            "max_prompt_logprobs": 4096,
        },
    )  # fmt: skip
    with stack(settings, tmp_path_factory.mktemp("scored")) as cluster:
        yield cluster


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(299), k=length)


def f32(value: float) -> float:
    return float(np.float32(value))


def echoed(ids: list[int], top: int) -> Json:
    """The beginning of completions' `logprobs`."""
    own: list[float | None] = [None]
    likely: list[dict[str, float] | None] = [None]
    for logits, token in zip(reference_logits(ids, SPEC), ids[1:], strict=False):
        logprob, logprobs, best, _ = score_row(logits, token, top)
        own.append(f32(logprob))
        row = {WORDS.label(int(i)): f32(value) for i, value in zip(best, logprobs, strict=True)}
        likely.append({**{WORDS.label(token): f32(logprob)}, **row})
    parts = [WORDS.token_bytes(i) or b"" for i in ids]
    offsets = [len(b"".join(parts[:at]).decode("utf-8", "ignore")) for at in range(len(ids))]
    return {
        "tokens": [WORDS.label(i) for i in ids],
        "token_logprobs": own,
        "top_logprobs": likely,
        "text_offset": offsets,
    }


def listed(ids: list[int], top: int) -> list[Json | None]:
    """vLLM's `prompt_logprobs`."""
    rows: list[Json | None] = [None]
    for logits, token in zip(reference_logits(ids, SPEC), ids[1:], strict=False):
        logprob, logprobs, best, rank = score_row(logits, token, top)
        row = {str(int(i)): (f32(value), at + 1) for at, (i, value) in enumerate(zip(best, logprobs, strict=True))}
        row[str(token)] = (f32(logprob), rank)
        rows.append(
            {
                token_id: {
                    "logprob": value,
                    "rank": place,
                    "decoded_token": (WORDS.token_bytes(int(token_id)) or b"").decode("utf-8", "replace"),
                }
                for token_id, (value, place) in row.items()
            }
        )
    return rows


def body(prompts: object, **fields: object) -> Json:
    return {"model": MODEL, "prompt": prompts, "temperature": 0, "ignore_eos": True, **fields}


async def ask(running: Stack, path: str, fields: Json) -> HttpAnswer:
    answer = await running.post(path, fields)
    assert answer.status == 200, answer.body
    return answer


def check_echo(choice: Json, ids: list[int], top: int, max_tokens: int) -> None:
    """The prompt, then the answer, in one row of lists whose offsets fit the text."""
    told, expected = choice["logprobs"], echoed(ids, top)
    count = len(ids)
    for name, values in expected.items():
        assert told[name][:count] == values, name
        assert len(told[name]) == count + max_tokens
    tokens = reference_tokens(ids, max_tokens, SPEC, stop_at_eos=False)
    assert told["tokens"][count:] == [WORDS.label(token) for token in tokens]
    assert choice["finish_reason"] == "length"
    text = b"".join(WORDS.token_bytes(token) or b"" for token in [*ids, *tokens]).decode("utf-8", "replace")
    assert choice["text"] == text


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("length", [1, BLOCK, 200])
async def test_echo_twice_whatever_is_cached_by_then(running: Stack, length: int, max_tokens: int) -> None:
    ids = [i % 128 for i in prompt(length)]  # characters, so that prompt and answer can be cut apart
    for _ in range(2):
        answer = await ask(running, COMPLETIONS, body(ids, echo=True, logprobs=2, max_tokens=max_tokens))
        check_echo(answer.json["choices"][0], ids, 2, max_tokens)
        assert answer.json["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": max_tokens,
            "total_tokens": length + max_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if length > 1:
            where = answer.headers["x-headrace-prefill"]
            assert where.startswith("prefill") if length > BLOCK else where == "local"
    await running.quiet()


async def test_a_stream_says_the_same(running: Stack) -> None:
    for max_tokens in (0, 4):
        fields = body(TEXT, echo=True, logprobs=1, max_tokens=max_tokens)
        whole = (await ask(running, COMPLETIONS, fields)).json["choices"][0]
        check_echo(whole, list(TEXT.encode()), 1, max_tokens)
        stream = await ask(running, COMPLETIONS, {**fields, "stream": True})
        *chunks, done = stream.events()
        assert done == "[DONE]"
        told = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in told) == whole["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for choice in told for entry in choice["logprobs"][name]] == whole["logprobs"][name]


async def test_several_prompts_each_with_several_answers(running: Stack) -> None:
    prompts = [[i % 128 for i in prompt(length)] for length in (3, 40, 130)]
    answer = await ask(running, COMPLETIONS, body(prompts, prompt_logprobs=3, n=2, max_tokens=2, logprobs=0))
    choices = answer.json["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [listed(ids, 3) for ids in prompts for _ in range(2)]
    assert all(len(choice["logprobs"]["tokens"]) == 2 for choice in choices)
    both = await ask(running, COMPLETIONS, body(prompts[1], prompt_logprobs=1, echo=True, logprobs=4, max_tokens=0))
    [choice] = both.json["choices"]
    assert choice["prompt_logprobs"] == listed(prompts[1], 1)
    assert choice["logprobs"] == echoed(prompts[1], 4)


async def test_chat_and_a_prompt_that_is_only_echoed(running: Stack) -> None:
    messages = [{"role": "user", "content": TEXT}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 0}
    answer = (await ask(running, CHAT, fields)).json
    assert answer["prompt_logprobs"] == listed(list(f"user: {TEXT}\nassistant: ".encode()), 0)
    assert (await ask(running, CHAT, {**fields, "max_tokens": 0})).json["usage"]["completion_tokens"] == 0
    [choice] = (await ask(running, COMPLETIONS, body(TEXT, echo=True, max_tokens=0))).json["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (TEXT, None, "length")


async def test_grpc(running: Stack) -> None:
    ids = prompt(150)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=2
    )
    tokens: list[pb.PromptToken] = []
    written: list[int] = []
    async with channel(running.cluster.grpc_address) as connection:
        async for event in InferenceStub(connection).Generate(request, timeout=30):
            if event.HasField("prompt"):
                assert event.prompt.start == len(tokens)
                assert not written
                tokens += event.prompt.tokens
            written += event.delta.token_ids
    assert written == reference_tokens(ids, 2, SPEC, stop_at_eos=False)
    assert [token.token_id for token in tokens] == ids
    assert not tokens[0].HasField("logprob")
    for token, logits in zip(tokens[1:], reference_logits(ids, SPEC), strict=False):
        logprob, logprobs, best, rank = score_row(logits, token.token_id, 2)
        assert (token.token, token.rank) == (WORDS.token_bytes(token.token_id), rank)
        assert token.logprob == f32(logprob)
        assert [(one.token_id, one.logprob) for one in token.top] == [
            (int(i), f32(value)) for i, value in zip(best, logprobs, strict=True)
        ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": [1] * 200}, "prompt_logprobs"),  # 4,200 of at most 4,096
        ({"echo": True, "logprobs": 10, "n": 4, "prompt": [[1] * 50] * 2}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_refused_by_name(running: Stack, fields: Json, param: str) -> None:
    answer = await running.post(COMPLETIONS, body("x", **fields) if "prompt" not in fields else {**body("x"), **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_a_prefill_worker_dies_in_mid_prompt(running: Stack) -> None:
    """Its prompts are read on by another, or by decode: every number is right, whoever told it."""
    prompts = [prompt(400, seed) for seed in range(8)]
    victim = "prefill-0"

    async def reading() -> bool:
        workers = {worker["worker"]: worker for worker in (await running.status())["workers"]}
        return int(workers[victim]["attempts"]) > 0

    async def one(ids: list[int]) -> Json:
        answer = await ask(running, COMPLETIONS, body(ids, prompt_logprobs=1, max_tokens=2))
        choice = answer.json["choices"][0]
        assert isinstance(choice, dict)
        return choice

    async def lost() -> int:
        return (await running.counters()).get("handoff_left: link lost", 0)

    before = await lost()
    for _ in range(ROUNDS):
        asked = [asyncio.create_task(one(ids)) for ids in prompts]
        assert await until(reading, 10.0)
        os.kill(running.pids()[victim][0], signal.SIGKILL)
        choices = await asyncio.gather(*asked)
        assert [choice["prompt_logprobs"] for choice in choices] == [listed(ids, 1) for ids in prompts]
        await running.all_ready(RESTART_S)
        await running.quiet()
        if await lost() > before:  # else it was through with all it had when it died
            return
    pytest.fail(f"{victim} died {ROUNDS} times, and never in mid prompt")
