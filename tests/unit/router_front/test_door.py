"""The pipeline between the skins and the dispatcher."""

import threading
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings
from cluster.core.errors import DeadlineExceeded, InvalidRequest, RequestFailed, Unavailable
from router.front.ask import Ask, Prompt, Spelling, TextPrompt, TokenPrompt
from router.front.door import INLINE_CHARACTERS, FrontDoor
from router.front.messages import ChatPrompt, ChatTurn
from router.front.metrics import FrontMetrics
from router.front.model_text import ModelText
from router.front.text import Delta
from router.front.tokenizer import TracerTokenizer
from router.requests import Limits, TokenEvent
from tests.fakes.dispatcher import FakeDispatcher, Step, say

LIMITS = Limits(max_context=50_000, pool_tokens=60_000, block_size=16, vocab_size=1024, eos_ids=(1023,))


class SlowTokenizer(TracerTokenizer):
    """Takes a second of the given clock, and remembers which thread it ran in."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        self.threads.append(threading.current_thread())
        self._clock.advance(1)
        return super().encode(text, add_special=add_special)


class Rig:
    def __init__(self, steps: Sequence[Step] = (), *, deadline_s: float = 600) -> None:
        self.clock = ManualClock()
        self.tokenizer = SlowTokenizer(self.clock)
        self.dispatcher = FakeDispatcher(lambda _: steps, LIMITS)
        metrics = FrontMetrics(CollectorRegistry(), self.clock)
        settings = RouterSettings(deadline_s=deadline_s)
        self.front = FrontDoor(settings, "m", ModelText(self.tokenizer, None), self.dispatcher, self.clock, metrics)
        self.call = metrics.call("completions")
        self.metrics = metrics

    def seconds(self, name: str) -> tuple[float | None, float | None]:
        """How many of these times were observed, and their sum."""
        value, labels = self.metrics.registry.get_sample_value, {"api": "completions"}
        return tuple(value(f"headrace_{name}_seconds_{part}", labels) for part in ("count", "sum"))  # type: ignore[return-value]


def ask(prompt: Prompt) -> Ask:
    return Ask(model="m", prompt=prompt, spelling=Spelling(prompt="prompt"))


async def test_long_texts_are_tokenised_in_a_thread() -> None:
    rig = Rig()
    for length in (INLINE_CHARACTERS, INLINE_CHARACTERS + 1):
        await rig.front.prepare(ask(TextPrompt("x" * length)), rig.call, public_id="p")
    here = threading.current_thread()
    assert [thread is here for thread in rig.tokenizer.threads] == [True, False]


async def test_a_text_far_too_long_is_refused_by_its_start() -> None:
    rig = Rig()
    lengths: list[int] = []
    encode = rig.tokenizer.encode

    def watched(text: str, *, add_special: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special=add_special)

    rig.tokenizer.encode = watched  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="more than 50000 tokens") as caught:
        await rig.front.prepare(ask(TextPrompt("x" * 4_000_000)), rig.call, public_id="p")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert lengths == [16 * LIMITS.max_context]


async def test_time_spent_tokenising_is_taken_from_the_deadline() -> None:
    rig = Rig(deadline_s=10)
    prompt = ask(TextPrompt("x"))
    assert (await rig.front.prepare(prompt, rig.call, public_id="p")).deadline_s == 9
    assert (await rig.front.prepare(prompt, rig.call, public_id="p", deadline_s=5)).deadline_s == 4
    with pytest.raises(DeadlineExceeded):
        await rig.front.prepare(prompt, rig.call, public_id="p", deadline_s=0.5)


async def test_a_bad_parameter_is_told_even_while_no_worker_is_known() -> None:
    rig = Rig()
    rig.dispatcher.available = False
    with pytest.raises(InvalidRequest):
        await rig.front.prepare(ask(TextPrompt("")), rig.call, public_id="p")
    with pytest.raises(Unavailable):
        await rig.front.prepare(ask(TextPrompt("x")), rig.call, public_id="p")


async def test_a_base_model_has_no_chat() -> None:
    rig = Rig()
    with pytest.raises(InvalidRequest, match="no chat template"):
        await rig.front.prepare(ask(ChatPrompt((ChatTurn("user", "x"),))), rig.call, public_id="p")


async def test_tokens_of_a_sample_nobody_asked_for_fail_the_request() -> None:
    rig = Rig([TokenEvent(1, (65,))])
    asked = ask(TokenPrompt((1,)))
    request = await rig.front.prepare(asked, rig.call, public_id="p")
    with pytest.raises(RequestFailed, match="sample 1"):
        async with rig.front.open(request, rig.call, asked) as generation:
            [delta async for delta in generation]
    assert not rig.dispatcher.active


async def test_tokens_behind_an_end_are_dropped_and_counted() -> None:
    rig = Rig([TokenEvent(0, (65, 1023, 66)), TokenEvent(0, (67,), end="eos")])
    asked = ask(TokenPrompt((1, 2)))
    request = await rig.front.prepare(asked, rig.call, public_id="p")
    async with rig.front.open(request, rig.call, asked) as generation:
        deltas = [delta async for delta in generation]
    assert [(delta.text, delta.finish) for delta in deltas if isinstance(delta, Delta)] == [("A", "stop")]
    assert generation.usage.completion == 2
    assert generation.dropped_tokens == 1
    assert rig.dispatcher.runs[0].stopped == [0]


async def test_tokens_behind_an_end_are_no_gap_of_their_sample_and_do_not_make_it_slow() -> None:
    """While another sample goes on: nobody waits for them, and nobody sees them."""
    rig = Rig(
        [
            TokenEvent(0, (65,)),
            TokenEvent(1, (65,)),
            TokenEvent(0, (66, 1023)),
            TokenEvent(0, (67,)),
            TokenEvent(1, (66,), end="length"),
        ]
    )
    asked = ask(TokenPrompt((1, 2)))._replace(n=2)
    request = await rig.front.prepare(asked, rig.call, public_id="p")
    waits = iter((0, 4, 6, 0))
    async with rig.front.open(request, rig.call, asked) as generation:
        async for _ in generation:
            rig.clock.advance(next(waits))
    assert rig.seconds("itl") == (2, 4 + 10)
    assert rig.seconds("tpot") == (2, 4 / 2 + 10)


async def test_a_router_that_leaves_is_not_ready_whatever_page_is_asked() -> None:
    rig = Rig()
    ready = rig.metrics.registry.get_sample_value
    assert ready("headrace_router_ready") == 1
    rig.front.draining = True
    assert rig.front.not_ready_reasons()
    assert ready("headrace_router_ready") == 0


async def test_how_long_the_controller_has_been_silent_is_told_where_there_is_one() -> None:
    rig = Rig()
    value = rig.metrics.registry.get_sample_value
    assert value("headrace_controller_age_seconds") is None
    rig.front.members.replace(())
    rig.clock.advance(7.5)
    assert value("headrace_controller_age_seconds") == 7.5


async def test_what_the_controller_wants_is_told_where_that_is_known() -> None:
    rig = Rig()

    def wanted() -> list[float | None]:
        value = rig.metrics.registry.get_sample_value
        return [value("headrace_desired_programs", {"pool": pool}) for pool in ("prefill", "decode", "router")]

    assert wanted() == [None, None, None]
    rig.front.members.replace((), desired={"prefill": 0, "decode": 2, "router": 1})
    assert wanted() == [0, 2, 1]
    rig.front.members.replace(())
    assert wanted() == [None, None, None]


async def test_ids_are_never_the_client_s() -> None:
    rig = Rig()
    rig.dispatcher.script = say("x")
    requests = [await rig.front.prepare(ask(TokenPrompt((1,))), rig.call, public_id="same") for _ in range(2)]
    assert {request.public_id for request in requests} == {"same"}
    assert len({request.request_id for request in requests}) == 2
    assert all(len(request.request_id) == 32 for request in requests)
