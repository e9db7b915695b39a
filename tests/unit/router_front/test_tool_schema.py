"""What a demanded call must look like, and that a tool's own references survive being put inside."""

import json

import orjson
import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.grammar import tracer_vocabulary
from router.front.bodies import ChatBody
from router.front.tools.schema import demanded
from router.front.tools.types import Tool, ToolUse

NODE = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": ["small", "large"]}},
}
TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
TOOLS = (Tool("pick", parameters=NODE), Tool("grow", parameters=TREE), Tool("stop"))


def allows(schema: str, text: str) -> bool:
    """Whether the whole text is one the grammar may write, and may end with."""
    matcher = tracer_vocabulary(1024).compile("json_schema", schema)
    for byte in text.encode():
        if not matcher.allowed()[byte]:
            return False
        matcher.consume([byte])
    return bool(matcher.allowed()[tracer_eos()])


def tracer_eos() -> int:
    matcher = tracer_vocabulary(1024).compile("regex", "a")
    matcher.consume([ord("a")])
    (eos,) = matcher.allowed().nonzero()[0]
    return int(eos)


@pytest.mark.parametrize(
    ("calls", "allowed"),
    [
        ([{"name": "pick", "arguments": {"size": "large"}}], True),
        ([{"name": "pick", "arguments": {"size": "huge"}}], False),
        ([{"name": "grow", "arguments": {"child": {"child": {}}}}], True),
        ([{"name": "grow", "arguments": {"child": 1}}], False),
        ([{"name": "stop", "arguments": {}}, {"name": "pick", "arguments": {"size": "small"}}], True),
        ([{"name": "other", "arguments": {}}], False),
        ([], False),
    ],
)
def test_a_demanded_answer_is_a_list_of_calls(calls: list[object], allowed: bool) -> None:
    schema = demanded(ToolUse(TOOLS, must=True))
    assert schema is not None
    assert allows(schema, json.dumps(calls, separators=(",", ":"))) is allowed


def test_one_call_where_one_is_wanted() -> None:
    schema = demanded(ToolUse(TOOLS, must=True, parallel=False))
    assert schema is not None
    call = {"name": "stop", "arguments": {}}
    assert allows(schema, json.dumps([call], separators=(",", ":")))
    assert not allows(schema, json.dumps([call, call], separators=(",", ":")))


def test_of_a_named_function_only_the_arguments_are_written() -> None:
    schema = demanded(ToolUse(TOOLS, must=True, named="pick"))
    assert schema is not None
    assert allows(schema, '{"size":"small"}')
    assert not allows(schema, '{"size":"tiny"}')


def test_nothing_is_demanded_where_calling_is_left_to_the_model() -> None:
    assert demanded(ToolUse(TOOLS)) is None


def test_a_body_that_demands_a_call_has_its_grammar_and_no_other() -> None:
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "pick", "parameters": NODE}}],
        "tool_choice": "required",
    }
    (ask,) = ChatBody.parse(orjson.dumps(fields)).asks()
    assert ask.grammar is not None
    assert (ask.grammar.kind, ask.spelling.grammar) == ("json_schema", "tools")
    with pytest.raises(InvalidRequest, match="tool_choice demands a call, and response_format says"):
        ChatBody.parse(orjson.dumps({**fields, "response_format": {"type": "json_object"}})).asks()
