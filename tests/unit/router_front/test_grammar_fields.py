"""One grammar under many names; which fields are one, and which are refused by name."""

import json

import pytest

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from cluster.stubs import inference_pb2 as pb
from router.front.ask import Ask
from router.front.bodies import ChatBody, CompletionBody
from router.front.bounds import MAX_GRAMMAR_CHARACTERS, check_parameters
from router.front.grammar_fields import GRAMMAR_FIELDS, MAX_CHOICES
from router.front.grpc_service import ask_of
from router.requests import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
AS_JSON = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"integer"}}}'
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def completion(**fields: object) -> Ask:
    return CompletionBody.parse(json.dumps({"model": "m", "prompt": "hello", **fields}).encode()).asks()[0]


def refused(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters(completion(**fields), RouterSettings())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "grammar", "param"),
    [
        ({"response_format": NAMED}, Grammar("json_schema", AS_JSON), "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        ({"guided_json": SCHEMA}, Grammar("json_schema", AS_JSON), "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", AS_JSON), "guided_json"),
        ({"guided_json_object": True}, Grammar("json_object"), "guided_json_object"),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
        ({"guided_grammar": "start: x"}, Grammar("lark", "start: x"), "guided_grammar"),
        ({"guided_choice": ["ja", '"né"']}, Grammar("lark", 'start: "ja" | "\\"né\\""'), "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", AS_JSON), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("lark", 'start: "a"'), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("lark", "start: x"), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object"), "structured_outputs.json_object"),
    ],
)
def test_every_name_for_a_grammar(fields: dict[str, object], grammar: Grammar, param: str) -> None:
    ask = completion(**fields)
    assert (ask.grammar, ask.spelling.grammar) == (grammar, param)
    chat = ChatBody.parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).encode())
    assert chat.asks()[0].grammar == grammar


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"guided_json_object": False}, dict.fromkeys(GRAMMAR_FIELDS, None)],
)
def test_fields_that_ask_for_no_grammar(fields: dict[str, object]) -> None:
    assert completion(**fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json_object": 1}, "guided_json_object"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    assert refused(**fields).param == param


def test_a_schema_nested_beyond_what_json_is_written_to_is_refused() -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    assert refused(guided_json=schema).param == "guided_json"


@pytest.mark.parametrize(
    ("message", "grammar"),
    [
        (pb.GenerateRequest(json_object=True), Grammar("json_object")),
        (pb.GenerateRequest(json_object=False), None),
        (pb.GenerateRequest(json_schema="{}"), Grammar("json_schema", "{}")),
        (pb.GenerateRequest(regex="a"), Grammar("regex", "a")),
        (pb.GenerateRequest(lark="start: x"), Grammar("lark", "start: x")),
        (pb.GenerateRequest(choice=pb.Choice(texts=["a", "b"])), Grammar("lark", 'start: "a" | "b"')),
        (pb.GenerateRequest(), None),
    ],
)
def test_the_same_over_grpc(message: pb.GenerateRequest, grammar: Grammar | None) -> None:
    message.prompt = "x"
    assert ask_of(message, "m").grammar == grammar


def test_penalties_and_bias_over_grpc() -> None:
    message = pb.GenerateRequest(
        prompt="x", presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5, min_p=0.1, min_tokens=3,
        logit_bias={5: 2.0},
    )  # fmt: skip
    ask = ask_of(message, "m")
    assert (ask.presence_penalty, ask.frequency_penalty, ask.repetition_penalty) == (0.5, -1, 1.5)
    assert (ask.min_p, ask.min_tokens, ask.logit_bias) == (0.1, 3, ((5, 2.0),))
    bare = ask_of(pb.GenerateRequest(prompt="x"), "m")
    assert (bare.presence_penalty, bare.repetition_penalty, bare.min_p, bare.min_tokens) == (None,) * 4
