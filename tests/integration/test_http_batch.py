"""Several prompts in one request, and prompts that are echoed, over HTTP against a scripted dispatcher (FAULTS C16)."""

import asyncio
from collections.abc import Sequence

import httpx
import openai
import pytest

from cluster.core.config import RouterSettings
from cluster.core.errors import RequestFailed
from router.requests import Request, TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, Step, say
from tests.integration.front_door_server import MODEL, serve

PROMPTS = ["a", "bb", "ccc"]


def own(request: Request) -> Sequence[Step]:
    """Every sample repeats its prompt and says which sample it is."""
    steps: list[Step] = []
    for at in range(len(request.prompt)):
        steps += [TokenEvent(index, request.prompt[at : at + 1]) for index in range(request.n)]
    return steps + [TokenEvent(index, (ord("0") + index, 1023), end="eos") for index in range(request.n)]


@pytest.mark.parametrize("at_once", [1, 2, 16])
@pytest.mark.parametrize("prompt", [PROMPTS, [list(text.encode()) for text in PROMPTS]])
async def test_every_choice_has_its_index(prompt: list[str] | list[list[int]], at_once: int) -> None:
    dispatcher = FakeDispatcher(own)
    settings = RouterSettings(prompts_at_once=at_once)
    async with serve(dispatcher, settings) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt=prompt, n=2)
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, finishes, usage = [""] * 6, list[str](), None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                finishes += [choice.finish_reason] if choice.finish_reason else []
    expected = [text + str(sample) for text in PROMPTS for sample in range(2)]
    assert [choice.text for choice in whole.choices] == texts == expected
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert finishes == ["stop"] * 6
    assert whole.usage is not None
    assert whole.usage == usage
    assert whole.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert whole.usage.completion_tokens == sum(len(text) + 1 for text in expected)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 16 * 3
    assert served.outcomes("completions") == {"ok": 2}
    assert not dispatcher.active


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_every_prompt_and_starts_no_other(stream: bool) -> None:
    dispatcher = FakeDispatcher(lambda _: [TokenEvent(0, (65,)), asyncio.Event()])
    body = {"model": MODEL, "prompt": ["x"] * 20, "stream": stream}
    async with serve(dispatcher, RouterSettings(prompts_at_once=4)) as served, asyncio.timeout(10):
        async with httpx.AsyncClient(timeout=None) as client:
            asking = asyncio.create_task(client.post(f"{served.url}/v1/completions", json=body))
            await dispatcher.until_active(4)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await dispatcher.until_active(0)
    assert len(dispatcher.requests) == 4
    assert served.outcomes("completions") == {"cancelled": 1}


async def test_one_failure_ends_all() -> None:
    def script(request: Request) -> Sequence[Step]:
        return [RequestFailed("broken")] if request.prompt == (ord("b"),) else [asyncio.Event()]

    dispatcher = FakeDispatcher(script)
    async with serve(dispatcher) as served, served.openai() as client:
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.completions.create(model=MODEL, prompt=["a", "b", "c"])
    assert not dispatcher.active
    assert served.outcomes("completions") == {"failed": 1}


async def test_all_prompts_are_looked_at_before_one_is_sent() -> None:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt=["a", "b" * 600])
        with pytest.raises(openai.BadRequestError) as many:
            await client.completions.create(model=MODEL, prompt=["a"] * 100, n=3)
    assert long.value.param == "prompt[1]"
    assert "300 choices" in many.value.message
    assert not dispatcher.requests


@pytest.mark.parametrize("prompt", ["Zażółć 🌶", list("Zażółć 🌶".encode()), ["Zażółć 🌶", "你好"]])
async def test_an_echoed_prompt_goes_before_the_answer(prompt: str | list[int] | list[str]) -> None:
    async with serve(FakeDispatcher(say("ok"))) as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt=prompt, echo=True, n=2)
        stream = await client.completions.create(model=MODEL, prompt=prompt, echo=True, n=2, stream=True)
        texts = [""] * len(whole.choices)
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    echoed = ["Zażółć 🌶", "你好"] if prompt[1:] == ["你好"] else ["Zażółć 🌶"]
    expected = [f"{text}ok" for text in echoed for _ in range(2)]
    assert [choice.text for choice in whole.choices] == texts == expected


async def test_stop_strings_and_special_tokens_are_shown_to_those_who_ask() -> None:
    async with serve(FakeDispatcher(say("abc"))) as served, served.openai() as client:
        for body, text in (({}, "a"), ({"include_stop_str_in_output": True}, "ab")):
            answer = await client.completions.create(model=MODEL, prompt="x", stop="b", extra_body=body)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
