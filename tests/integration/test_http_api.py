"""The OpenAI API over real HTTP, with the openai client, against a scripted dispatcher."""

import openai
import pytest

from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, serve


async def test_chat_whole() -> None:
    async with serve(FakeDispatcher(say("Paris 🗼"))) as served, served.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "Paris 🗼"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(b"user: hello\nassistant: ")
    assert answer.usage.completion_tokens == len("Paris 🗼".encode()) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_stream() -> None:
    async with serve(FakeDispatcher(say("Paris 🗼"))) as served, served.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris 🗼"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 23 + 11
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completion_stream_equals_whole() -> None:
    async with serve(FakeDispatcher(say("abc def"))) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="x", stop=["ef"])
        stream = await client.completions.create(model=MODEL, prompt="x", stop=["ef"], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == "abc d"


async def test_unknown_model_is_not_found() -> None:
    async with serve(FakeDispatcher(say("x"))) as served, served.openai() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
