"""OpenAI bodies: what is taken, what is refused and under which name."""

import json
from dataclasses import replace

import pytest

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from router.front.ask import Ask, TextPrompt, TokenPrompt
from router.front.bodies import ChatBody, CompletionBody
from router.front.bounds import check_parameters, fit
from router.front.messages import ChatPrompt, ChatTurn
from router.front.tools.types import Tool, ToolCall, ToolUse
from router.front.unsupported import INTERNAL, NEUTRAL
from router.requests import Limits

LIMITS = Limits(max_context=512, pool_tokens=1024, block_size=16, vocab_size=1024, eos_ids=(1023,))
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields: object) -> Ask:
    return CompletionBody.parse(json.dumps({"model": "m", "prompt": "hello", **fields}).encode()).asks()[0]


def chat(**fields: object) -> Ask:
    return ChatBody.parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode()).asks()[0]


def refused(**fields: object) -> InvalidRequest:
    """The error of a completion body, after every check."""
    with pytest.raises(InvalidRequest) as caught:
        check(fields)
    return caught.value


def check(fields: dict[str, object]) -> None:
    ask = completion(**fields)
    check_parameters(ask, RouterSettings())
    ids = ask.prompt.ids if isinstance(ask.prompt, TokenPrompt) else tuple(b"hello")
    fit(ask, ids, LIMITS)


def chat_refused(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters(chat(**fields), RouterSettings())
    return caught.value


NUMBERS: list[object] = [-2, 2**31, 2**63, 2**64, -(2**63), 1e308, "1", True, [], {}, 10**6]


@pytest.mark.parametrize("value", [*NUMBERS, 1.5, 0])
@pytest.mark.parametrize("name", ["max_tokens", "n", "logprobs"])
def test_a_count_that_cannot_be_is_refused_by_name(name: str, value: object) -> None:
    if name == "logprobs" and value == 0 and value is not False:
        assert completion(logprobs=0).logprobs == 0
    else:
        assert refused(**{name: value}).param == name


@pytest.mark.parametrize("value", [-0.001, 2.001, 1e308, "1", True, [], {}, -(2**63)])
def test_temperature(value: object) -> None:
    assert refused(temperature=value).param == "temperature"


@pytest.mark.parametrize("value", [0, -0.1, 1.01, 1e308, "1", False, [1]])
def test_top_p(value: object) -> None:
    assert refused(top_p=value).param == "top_p"


@pytest.mark.parametrize("value", [-2, 2**31, 1.5, "4", True])
def test_top_k(value: object) -> None:
    assert refused(top_k=value).param == "top_k"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 0.5, "7", True])
def test_seed(value: object) -> None:
    assert refused(seed=value).param == "seed"


@pytest.mark.parametrize("value", ["", ["a", ""], [1], 5, {"a": 1}, ["x"] * 17, "x" * 1025, [["a"]]])
def test_stop(value: object) -> None:
    assert refused(stop=value).param == "stop"


@pytest.mark.parametrize("value", [[-1], [1024], [2**63], [1.5], [True], ["1"], 5, list(range(129))])
def test_stop_token_ids(value: object) -> None:
    assert str(refused(stop_token_ids=value).param).startswith("stop_token_ids")


@pytest.mark.parametrize(
    "value",
    [
        "",
        [],
        [[]],
        [""],
        [-1],
        [1024],
        [2**63],
        [2**64],
        [1.5],
        [True],
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        ["a"] * 257,
        None,
        5,
        {},
        [None],
        [[1, None]],
        [[[1]]],
    ],
)
def test_prompt(value: object) -> None:
    assert refused(prompt=value).param == "prompt"


@pytest.mark.parametrize("value", ["yes", 1, []])
@pytest.mark.parametrize("name", ["stream", "ignore_eos"])
def test_flags(name: str, value: object) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_internal_fields_are_refused_by_name_even_when_null(name: str) -> None:
    error = refused(**{name: None})
    assert (error.param, error.code) == (name, "internal_parameter")


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_not_built_yet_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    completion(**{name: None})
    for neutral in NEUTRAL[name]:
        completion(**{name: neutral})
    for value in ("other", 7, 0.5, [1], {"a": 1}):
        error = refused(**{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


def test_logit_bias_is_an_object_of_token_ids_and_numbers() -> None:
    assert completion(logit_bias={"5": 1, "7": -0.5}).logit_bias == ((5, 1.0), (7, -0.5))
    assert completion(logit_bias=None) == completion(logit_bias={}) == completion()
    for value in (
        {"a": 1},
        {"-1": 1},
        {"5": "1"},
        {"5": True},
        {"5": None},
        [[5, 1]],
        5,
        {str(i): 1 for i in range(301)},
    ):
        assert refused(logit_bias=value).param == "logit_bias"


def test_false_is_not_zero() -> None:
    assert refused(presence_penalty=False).param == "presence_penalty"
    assert refused(store=0).param == "store"


def test_unknown_fields_are_ignored() -> None:
    assert completion(something=1, user="u", metadata={"a": "b"}, request_id="mine") == completion()


@pytest.mark.parametrize(
    ("best_of", "n", "code"),
    [
        (3, 2, "unsupported_parameter"),
        (1, 2, "invalid_value"),
        (2, None, "unsupported_parameter"),
        (True, 1, "invalid_type"),
    ],
)
def test_best_of(best_of: object, n: int | None, code: str) -> None:
    error = refused(best_of=best_of, n=n)
    assert (error.param, error.code) == ("best_of", code)


def test_best_of_that_repeats_n_asks_for_nothing() -> None:
    assert completion(best_of=2, n=2).n == 2


NO_OBJECTS = [b"", b"{", b"[]", b'"text"', b"null", b"[" * 5000, b"\xff\xfe", b'{"model": "\xff"}']
NO_VALUES = [b'{"a": NaN}', b'{"a": 1e999}', b'{"prompt": "\\ud800"}']


@pytest.mark.parametrize("raw", [*NO_OBJECTS, *NO_VALUES])
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CompletionBody.parse(raw)
    assert caught.value.code == "invalid_json"


def test_an_error_does_not_name_our_classes() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatBody.parse(b'{"model": "m", "messages": [1]}')
    assert str(caught.value) == "messages[0]: input should be an object"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatBody.parse(b'{"model": "m"}')
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "1"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [CALL] * 129}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "function", "content": "x"}], "messages[1].role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "messages[0].function_call"),
    ],
)
def test_messages(messages: object, param: str) -> None:
    assert chat_refused(messages=messages).param == param


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = chat(messages=[{"role": "developer", "content": parts}])
    assert ask.prompt == ChatPrompt((ChatTurn("system", "a\nb"),))


def test_a_conversation_with_tools() -> None:
    answer = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]}
    ask = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, answer])
    assert ask.prompt == ChatPrompt(
        (
            ChatTurn("user", "hi"),
            ChatTurn("assistant", "", (ToolCall("1", "f", '{"a": 1}'),)),
            ChatTurn("tool", "sunny", tool_call_id="1"),
        )
    )


def test_tools_and_what_may_be_called() -> None:
    tool = Tool("f", None, {"type": "object"})
    assert chat(tools=[TOOL]).tools == chat(tools=[TOOL], tool_choice="auto").tools == ToolUse((tool,))
    assert chat(tools=[TOOL], parallel_tool_calls=False).tools == ToolUse((tool,), parallel=False)
    assert chat(tools=[TOOL], tool_choice="required").tools == ToolUse((tool,), must=True)
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[TOOL], tool_choice=named).tools == ToolUse((tool,), must=True, named="f")
    for nothing in (chat(tools=[]), chat(tools=None), chat(tools=[TOOL], tool_choice="none"), chat(tool_choice="auto")):
        assert nothing.tools is None
        assert nothing.prompt == chat().prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_tools_that_cannot_be(fields: dict[str, object], param: str) -> None:
    assert chat_refused(**fields).param == param


def test_how_messages_become_a_prompt() -> None:
    plain = ChatPrompt((ChatTurn("user", "hi"),))
    assert chat(add_generation_prompt=True, continue_final_message=False, chat_template_kwargs=None).prompt == plain
    assert chat(add_generation_prompt=False).prompt == replace(plain, add_generation_prompt=False)
    assert chat(continue_final_message=True).prompt == replace(plain, continue_final=True)
    assert chat(chat_template_kwargs={"thinking": False}).prompt == replace(plain, variables={"thinking": False})
    assert chat().fresh
    assert not chat(continue_final_message=True).fresh
    both = chat_refused(continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    assert chat_refused(chat_template_kwargs={"messages": []}).param == "chat_template_kwargs"


def test_max_tokens_by_either_name() -> None:
    assert chat(max_completion_tokens=5).max_tokens == chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert chat_refused(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"
    assert chat_refused(max_completion_tokens=0).param == "max_completion_tokens"
    assert chat_refused(max_tokens=0).param == "max_tokens"


def test_max_tokens_may_be_0_where_the_prompt_is_answered_with() -> None:
    for fields in ({"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
        ask = completion(max_tokens=0, **fields)
        check_parameters(ask, RouterSettings())
        assert fit(ask, (1,) * 512, LIMITS).max_tokens == 0  # no room is needed
    assert refused(max_tokens=0, logprobs=1).param == "max_tokens"
    assert refused(max_tokens=0, echo=True, min_tokens=1).param == "min_tokens"
    with pytest.raises(InvalidRequest):
        fit(completion(max_tokens=0, echo=True), (1,) * 513, LIMITS)
    check_parameters(chat(max_tokens=0, prompt_logprobs=1), RouterSettings())


def test_prompt_logprobs() -> None:
    assert completion(prompt_logprobs=None).prompt_logprobs is None
    assert refused(prompt_logprobs=21).param == "prompt_logprobs"
    assert refused(prompt_logprobs=-1).param == "prompt_logprobs"
    assert refused(prompt_logprobs=True).param == "prompt_logprobs"
    assert refused(prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert chat(prompt_logprobs=4).scored == 4


def test_chat_logprobs() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat_refused(top_logprobs=3).param == "top_logprobs"
    assert chat_refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert chat_refused(logprobs=1).param == "logprobs"


def test_stream_options_need_a_stream() -> None:
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert refused(stream=True, stream_options=[]).param == "stream_options"


def test_several_prompts() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 1}
    first, second = CompletionBody.parse(json.dumps(body).encode()).asks()
    assert (first.prompt, second.prompt) == (TextPrompt("a"), TextPrompt("b"))
    assert second.spelling.prompt == "prompt[1]"
    assert (second.n, second.seed) == (2, 1)
    ids = CompletionBody.parse(json.dumps({**body, "prompt": [[1], [2, 3]]}).encode()).asks()
    assert [ask.prompt for ask in ids] == [TokenPrompt((1,)), TokenPrompt((2, 3))]


def test_prompts_of_every_kind() -> None:
    assert completion(prompt=["a"]).prompt == TextPrompt("a")
    assert completion(prompt=[[1, 2]]).prompt == TokenPrompt((1, 2))
    assert completion(prompt=[1, 2]).prompt == TokenPrompt((1, 2))


def test_no_error_quotes_the_prompt() -> None:
    for fields in ({"prompt": {"canary": 1}}, {"temperature": "canary"}, {"stop": {"canary": 1}}, {"n": ["canary"]}):
        assert "canary" not in refused(**fields).message
    assert "canary" not in chat_refused(messages=[{"role": "canary", "content": "canary"}]).message
