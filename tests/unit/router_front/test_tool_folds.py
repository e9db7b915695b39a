"""Tool calls out of text: the same for every grouping (FAULTS C22), and what is no call stays content."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.front.tools.folds import CallFold, HermesCalls, JsonCalls, NamedCall
from tests.unit.router_front.fold_tools import joined_calls, pieces

NAMES = frozenset({"f", "weather"})
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "}<"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": [1, {"b": "]"}]}}'

# What models write, mixed from the pieces that matter, broken in every way.
PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "{", "}", "[", "]", '"', ":", ",", ";", "\\", "\n", " ",
        '"name"', '"arguments"', '"parameters"', '"f"', '"weather"', "null", "12", '{"a": "b"}', '"{\\"a\\": 1}"', "é🌶",
        '{"name": "f", "arguments": {"a": 1}}', '{"name": "other", "parameters": {}}', "<|python_tag|>", HERMES, LLAMA,
    ]
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=12).map("".join)
FOLDS = st.sampled_from(
    [
        HermesCalls,
        lambda: HermesCalls(parallel=False),
        lambda: JsonCalls(NAMES),
        lambda: JsonCalls(NAMES, parallel=False),
        lambda: NamedCall("f"),
    ]
)


def read(fold: CallFold, *parts: str) -> tuple[str, list[tuple[str, str]], bool]:
    """(content, [(name, arguments)], complete)."""
    parsed = [*(fold.feed(part) for part in parts), fold.finish()]
    content = "".join(piece.content for piece in parsed)
    return content, joined_calls([call for piece in parsed for call in piece.calls]), fold.complete()


@given(FOLDS, TEXTS, st.lists(st.integers(0, 300), max_size=10))
def test_any_grouping_gives_the_same_content_and_calls(make: type[CallFold], text: str, places: list[int]) -> None:
    whole = read(make(), text)
    assert read(make(), *pieces(text, places)) == whole
    assert read(make(), *text) == whole


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<{[;,")))
def test_text_without_a_call_is_content(text: str) -> None:
    for fold in (HermesCalls(), JsonCalls(NAMES)):
        assert read(fold, text) == (text, [], False)


@given(TEXTS)
def test_what_is_no_call_is_shown_to_the_last_character(text: str) -> None:
    for fold in (HermesCalls(), JsonCalls(NAMES)):
        content, calls, _ = read(fold, text)
        assert calls or content == text


VALUES = st.one_of(st.text(max_size=5), st.integers(), st.none(), st.lists(st.text(max_size=3), max_size=2))
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)


@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans())
def test_arguments_come_back_as_they_were_written(given_: list[dict[str, object]], ascii_: bool) -> None:
    written = [json.dumps(arguments, ensure_ascii=ascii_) for arguments in given_]
    calls = [("f", arguments) for arguments in written]
    hermes = "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {a}}}\n</tool_call>' for a in written)
    llama = "; ".join(f'{{"name": "f", "parameters": {a}}}' for a in written)
    listed = "[" + ", ".join(f'{{"name": "f", "arguments": {a}}}' for a in written) + "]"
    assert read(HermesCalls(), "Let me see.\n" + hermes + "\n") == ("Let me see.", calls, True)
    assert read(JsonCalls(NAMES), "\n" + llama) == ("", calls, True)
    assert read(JsonCalls(NAMES), listed) == ("", calls, True)


@pytest.mark.parametrize(
    ("text", "content", "calls", "complete"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')], True),  # no closing marker
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", '{"a": 1}')], True),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')], True),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')], True),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')], True),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")], True),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], True),
        ('<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')], False),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', [], False),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', [], False),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', [], False),
        ("a <tool_cal", "a <tool_cal", [], False),
        ("a <<tool_call>b", "a <<tool_call>b", [], False),
        (f"{HERMES} done", " done", [("f", '{"a": "}<"}')], True),
        (f"a\n{HERMES}\n{HERMES}\n", "a", [("f", '{"a": "}<"}')] * 2, True),
        ('<tool_call>\n<tool_call>{"name": "f"}</tool_call>', "<tool_call>\n", [("f", "{}")], True),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]], complete: bool) -> None:
    assert read(HermesCalls(), text) == (content, calls, complete)


@pytest.mark.parametrize(
    ("text", "content", "calls", "complete"),
    [
        (LLAMA, "", [("f", '{"a": [1, {"b": "]"}]}')], True),
        (f"<|python_tag|>{LLAMA}", "", [("f", '{"a": [1, {"b": "]"}]}')], True),
        ('{"type": "function", "function": "f", "parameters": {}}', "", [("f", "{}")], True),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', [], False),
        ('{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', [], False),
        ("[1, 2]", "[1, 2]", [], False),
        (f"Sure: {LLAMA}", f"Sure: {LLAMA}", [], False),
        (f"{LLAMA}; and so on", "; and so on", [("f", '{"a": [1, {"b": "]"}]}')], True),
        ('{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')], False),
        ('{"name": "f"', '{"name": "f"', [], False),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, str]], complete: bool) -> None:
    assert read(JsonCalls(NAMES), text) == (content, calls, complete)


def test_a_second_call_is_not_read_where_one_is_wanted() -> None:
    for fold, text in (
        (HermesCalls(parallel=False), HERMES * 2),
        (JsonCalls(NAMES, parallel=False), LLAMA + ";" + LLAMA),
    ):
        _, calls, complete = read(fold, text)
        assert (len(calls), complete, fold.over) == (1, True, True)


def test_arguments_stream_as_they_come() -> None:
    fold = HermesCalls()
    shown = [
        fold.feed(part) for part in ('<tool_call>{"name": "f", ', '"arguments": {"a"', ': "x', 'y"}', "}</tool_call>")
    ]
    assert [[(call.name, call.arguments) for call in piece.calls] for piece in shown] == [
        [],
        [("f", '{"a"')],
        [(None, ': "x')],
        [(None, 'y"}')],
        [],
    ]


def test_a_named_call_is_all_of_the_answer() -> None:
    assert read(NamedCall("f"), '{"a":', " 1}") == ("", [("f", '{"a": 1}')], True)
    assert read(NamedCall("f"), '{"a":') == ("", [("f", '{"a":')], False)
