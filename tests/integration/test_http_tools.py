"""Tools over the OpenAI API, with the openai client's own helpers, against a scripted dispatcher (FAULTS C22)."""

from dataclasses import replace

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

from router.front.chat import ChatTemplate
from router.front.model_text import ModelText
from router.front.tokenizer import TracerTokenizer
from tests.fakes.dispatcher import DEFAULT_LIMITS, FakeDispatcher, Script, say
from tests.integration.front_door_server import MODEL, serve

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
PARIS, ROME = '{"city": "Paris 🗼"}', '{"city":  "Róma }"}'
TWO = (
    f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
)
LLAMA = ModelText(TracerTokenizer(), ChatTemplate("{{ tools }}{% if 'ipython' %}{% endif %}", {}))


def dispatcher(script: Script) -> FakeDispatcher:
    """With room for prompts that tell of tools."""
    return FakeDispatcher(script, replace(DEFAULT_LIMITS, max_context=4096, pool_tokens=4096))


@pytest.mark.parametrize("per_event", [1, 2, 8, 1000])
async def test_calls_of_a_whole_answer_and_of_a_stream_are_the_same(per_event: int) -> None:
    async with serve(dispatcher(say(TWO, per_event=per_event))) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        async with client.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        calls = choice.message.tool_calls or []
        assert [(c.function.name, c.function.arguments) for c in calls if c.type == "function"] == [
            ("weather", PARIS),
            ("weather", ROME),
        ]
        assert len({call.id for call in calls}) == 2
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(TWO.encode()) + 1
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [PARIS, ROME]


async def test_a_cut_call_is_not_called_complete() -> None:
    end = len(TWO.encode()) + 1
    fake = dispatcher(say(TWO, per_event=3))
    async with serve(fake) as served, served.openai() as client:
        for most in (*range(1, end, 7), end - 1, end):
            whole = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, max_tokens=most)
            streamed = await joined(client, most)
            message = whole.choices[0].message
            calls = [c.function for c in message.tool_calls or [] if c.type == "function"]
            finish = whole.choices[0].finish_reason
            assert streamed == (message.content or "", [(c.name, c.arguments) for c in calls], finish)
            assert finish == ("length" if most < end else "tool_calls")
            assert all(text.startswith(call.arguments) for text, call in zip((PARIS, ROME), calls, strict=False))


async def joined(client: AsyncOpenAI, most: int) -> tuple[str, list[tuple[str, str]], str | None]:
    """What a client that joins chunks by hand gets."""
    content, calls, finish = "", dict[int, tuple[str, str]](), None
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, max_tokens=most, stream=True
    )
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            assert (call.id is None) == (call.function.name is None) == (call.index in calls)
            name, arguments = calls.get(call.index, (call.function.name or "", ""))
            calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return content, list(calls.values()), finish


async def test_a_model_that_writes_json_alone() -> None:
    text = '{"name": "weather", "parameters": {"city": "Rome"}}'
    async with serve(dispatcher(say(text)), text=LLAMA) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        none = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="none")
    message = whole.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert (none.choices[0].message.content, none.choices[0].message.tool_calls) == (text, None)
    assert none.choices[0].finish_reason == "stop"


async def test_one_call_is_all_where_one_is_wanted() -> None:
    fake = dispatcher(say(TWO))
    async with serve(fake) as served, served.openai() as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, parallel_tool_calls=False
        )
    assert len(whole.choices[0].message.tool_calls or []) == 1
    assert whole.choices[0].finish_reason == "tool_calls"
    assert fake.runs[0].stopped == [0]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(TWO[: TWO.index("\n</tool_call>")].encode())


async def test_the_model_is_told_of_tools_calls_and_results() -> None:
    called: ChatCompletionMessageParam = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
    }
    answered: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    fake = dispatcher(say("x"))
    async with serve(fake) as served, served.openai() as client:
        await client.chat.completions.create(model=MODEL, messages=[*HELLO, called, answered], tools=TOOLS)
        await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="none")
    first, second = (bytes(request.prompt).decode() for request in fake.requests)
    assert first.startswith("system: You can call these functions.")
    assert '{"type": "function", "function": {"name": "clock", "parameters": {}}}' in first
    assert '"name": "weather", "description": "of a city"' in first
    assert 'assistant: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in first
    assert "user: <tool_response>\nnoon\n</tool_response>" in first
    assert second == "user: hello\nassistant: "


async def test_log_probabilities_of_calls_are_told_once_each() -> None:
    async with serve(dispatcher(say(TWO, per_event=3))) as served, served.openai() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, logprobs=True)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, logprobs=True, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in streamed) == TWO.encode()
