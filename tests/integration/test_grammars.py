"""Grammars on the real stack: valid every time on both paths; bombs hurt nobody but their sender (C18, S08)."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolChoiceOptionParam

from cluster.core.grammar import GrammarMatcher, tracer_vocabulary
from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from engine.messages import DrawRules, Grammar, SampleSpec
from engine.model.tracer import reference_tokens
from tests.integration.asks import EOS, Ask, End, ask_http
from tests.integration.stack import MODEL, SPEC, HttpAnswer, Stack, config, stack

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "yy"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
RULES = DrawRules(0, presence=0.5, repetition=1.2, grammar=Grammar("json_schema", json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("grammars")
    with stack(config(prefill=1, decode=1, step_s=0.0), folder) as cluster:
        pids = cluster.pids()
        yield cluster
        assert cluster.pids() == pids
    # gRPC's handlers of fork kill some of a router's children: see PROGRAM_VARIABLES.
    assert "fork() handlers" not in (folder / "logs" / "router-0.log").read_text()


async def ask(running: Stack, prompt: list[int], seed: int = 0, **fields: Any) -> HttpAnswer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, "seed": seed, **fields}
    return await running.post("/v1/completions", body)


def right(prompt: list[int], seed: int, rules: DrawRules) -> str:
    vocabulary = tracer_vocabulary(SPEC.vocab_size)

    def start() -> GrammarMatcher:
        assert rules.grammar is not None
        return vocabulary.compile(rules.grammar.kind, rules.grammar.source)

    spec = SampleSpec(0, seed, 1.0, 1.0, 0, -1)
    mine = DrawRules(len(prompt), rules.presence, rules.frequency, rules.repetition, grammar=rules.grammar)
    tokens = reference_tokens(prompt, 100, SPEC, spec, rules=mine, grammar=start)
    return b"".join(bytes((t,)) if t < 256 else b"<%d>" % t for t in tokens if t != EOS).decode()


@pytest.mark.parametrize("length", [8, 100], ids=["local", "split"])
async def test_json_is_valid_and_the_same_on_both_paths(running: Stack, length: int) -> None:
    how = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
    prompts = [random.Random(f"{length} {i}").choices(range(256), k=length) for i in range(8)]
    answers = [  # one by one: the pool is small, and who is pre-empted may be prefilled on decode after that
        await ask(running, p, i, presence_penalty=0.5, repetition_penalty=1.2, **how) for i, p in enumerate(prompts)
    ]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        [choice] = answer.json["choices"]
        assert choice["text"] == right(prompt, i, RULES)
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["text"])
            assert list(value) == ["kind", "size"]
            assert value["kind"] in ("x", "yy")
            assert 0 <= value["size"] <= 99
        else:
            assert answer.json["usage"]["completion_tokens"] == 100
    assert sum(answer.json["choices"][0]["finish_reason"] == "stop" for answer in answers) >= 6
    assert {answer.headers["x-headrace-prefill"] for answer in answers} == {"local" if length == 8 else "prefill-0"}


async def test_the_first_token_may_be_all_there_is(running: Stack) -> None:
    answer = await ask(running, [1] * 50, max_tokens=1, guided_regex="[ab]{3}")
    [choice] = answer.json["choices"]
    assert choice["text"] in ("a", "b")
    assert choice["finish_reason"] == "length"


async def test_a_choice_over_grpc(running: Stack) -> None:
    async with channel(running.cluster.grpc_address) as connection:
        request = pb.GenerateRequest(
            model=MODEL, token_ids=pb.TokenIds(ids=[1] * 50), max_tokens=20, choice=pb.Choice(texts=["yes", "no"])
        )
        events = [event async for event in InferenceStub(connection).Generate(request)]
    text = "".join(event.delta.text for event in events if event.HasField("delta"))
    assert text in ("yes", "no")


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(150):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
REFUSED: dict[str, dict[str, Any]] = {
    "open group": {"guided_regex": "("},
    "lookbehind": {"guided_regex": "(?<=x)*"},
    "nested groups": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "deep schema": {"guided_json": DEEP},
    "schema that is only itself": {"guided_json": {"$ref": "#"}},
    "reference into the web": {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    "many enums": {"guided_json": {"enum": [f"value {i}" for i in range(10_000)]}},
    "explosion": {
        "guided_json": {
            "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(12)]
        }
    },
    "unknown rule": {"guided_grammar": "start: nothing"},
    "what is not built": {"guided_json": {"type": "array", "uniqueItems": True}},
}
# Large, but bounded by the limits of each step: taken, and cheap or ended by its own limits.
HEAVY: dict[str, dict[str, Any]] = {
    "counted counts": {"guided_regex": "(a{1,1000}){1,1000}"},
    "subset construction": {"guided_regex": "(.*a.{200}){5}"},
    "draft 07 tuple": {"guided_json": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}},
    "recursive": {
        "guided_json": {
            "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}},
            "$ref": "#/$defs/n",
        }
    },
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bomb_is_a_400_that_names_the_field(running: Stack, name: str) -> None:
    answer = await ask(running, [1] * 20, **REFUSED[name])
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, next(iter(REFUSED[name])))
    assert len(answer.body) < 1000


async def test_streams_go_on_right_beside_bombs(running: Stack) -> None:
    streams = [Ask(tuple(range(40 + i)), 60) for i in range(4)]
    bombs = [*REFUSED.values(), *HEAVY.values()]
    outcomes, answers = await asyncio.gather(
        asyncio.gather(*(ask_http(running, stream) for stream in streams)),
        asyncio.gather(*(ask(running, [2] * 20, i, **bomb) for i, bomb in enumerate(bombs))),
    )
    assert [outcome.end for outcome in outcomes] == [End.OK] * len(streams)
    assert {answer.status for answer in answers} <= {200, 400}
    await running.quiet()


class Size(pydantic.BaseModel):
    """Pick a size."""

    kind: Literal["small", "large"]
    count: Annotated[int, pydantic.Field(ge=0, le=9)]


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Stack]:
    """Tools in words of single bytes take some hundred tokens."""
    pools = {role: {"replicas": 1, "pool_tokens": 4096} for role in ("prefill", "decode")}
    engine, tracer = {"max_context": 2048}, {"vocab_size": SPEC.vocab_size, "max_context": 2048}
    handoff = {"admission_window_tokens": 4096}
    with stack(config(pools=pools, engine={**engine, "tracer": tracer}, handoff=handoff), tmp_path) as cluster:
        yield cluster


async def test_the_clients_own_helpers_for_structures_and_demanded_calls(roomy: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "pick one"}]
        parsed = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Size, seed=1)
        assert isinstance(parsed.choices[0].message.parsed, Size)
        tool = pydantic_function_tool(Size, name="pick")
        choices: tuple[ChatCompletionToolChoiceOptionParam, ...] = (
            "required",
            {"type": "function", "function": {"name": "pick"}},
        )
        for choice in choices:
            called = await client.chat.completions.parse(
                model=MODEL, messages=messages, tools=[tool], tool_choice=choice, parallel_tool_calls=False, seed=2
            )
            (call,) = called.choices[0].message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, Size)
            assert (call.function.name, called.choices[0].finish_reason) == ("pick", "tool_calls")
            async with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=[tool], tool_choice=choice, parallel_tool_calls=False, seed=2
            ) as stream:
                streamed = await stream.get_final_completion()
            (same,) = streamed.choices[0].message.tool_calls or []
            assert same.function.arguments == call.function.arguments
