"""Bodies nested deeper than any client means: refused by name, before anything goes into them."""

import json

import pytest

from cluster.core.errors import InvalidRequest
from router.front.ask import TextPrompt
from router.front.bodies import ChatBody, CompletionBody
from router.front.http_tokens import TokenizeBody
from router.front.json_body import MAX_DEPTH


def within_each_other(depth: int) -> bytes:
    return b'{"a": ' * depth + b"1" + b"}" * depth


def deep_parameters(depth: int, choice: str = "auto") -> bytes:
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % within_each_other(depth)
    return b'{"model": "m", "messages": [], "tool_choice": "%s", "tools": [%s]}' % (choice.encode(), tool)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 1000])
def test_what_is_nested_too_deeply_is_refused_by_name(choice: str, depth: int) -> None:
    """Before anything goes into it by calls of itself: 700 deep the schema of a demanded call was an internal error."""
    with pytest.raises(InvalidRequest) as caught:
        ChatBody.parse(deep_parameters(depth, choice))
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest) as caught:
        TokenizeBody.parse(deep_parameters(depth))
    assert caught.value.param == "tools"


def test_brackets_in_texts_and_fields_that_are_ignored_are_not_nested_too_deeply() -> None:
    said = "[" * 5000 + "{" * 5000
    [ask] = CompletionBody.parse(json.dumps({"model": "m", "prompt": said}).encode()).asks()
    assert ask.prompt == TextPrompt(said)
    ids = [[1, 2]] * (MAX_DEPTH + 2)
    assert CompletionBody.parse(json.dumps({"model": "m", "prompt": ids}).encode()).asks()
    assert CompletionBody.parse(b'{"model": "m", "prompt": "x", "metadata": %s}' % within_each_other(500)).asks()
    [ask] = ChatBody.parse(deep_parameters(MAX_DEPTH - 5, "required")).asks()
    assert ask.grammar is not None
