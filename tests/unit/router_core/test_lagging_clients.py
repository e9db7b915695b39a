"""What waits for a client that does not read: one event a sample, the same tokens, and a bound.

And what does not have to: who waits for the next event may have it taken in the pass that brings it.
"""

import asyncio
import random

import pytest

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings, TimingSettings
from cluster.credentials import Credentials
from router.dispatcher import DispatcherCore
from router.requests import Request, TokenEvent, TokenLogprob
from router.runtime import MAX_HELD_IDS, RouterRuntime, RunningRequest

REQUEST = Request(request_id="r", public_id="p", prompt=(1, 2, 3), max_tokens=4, n=2)


def running() -> RunningRequest:
    core = DispatcherCore(RouterSettings(), TimingSettings(), 1, random.Random(0))
    return RunningRequest(RouterRuntime(core, ManualClock(), epoch=1, credentials=Credentials("a secret")), REQUEST)


async def test_what_came_meanwhile_is_one_event_for_each_sample() -> None:
    request, logprobs = running(), [TokenLogprob(-float(at)) for at in range(3)]
    for at in range(3):
        assert request.push(TokenEvent(0, (at,), (logprobs[at],), "length" if at == 2 else None))
        assert request.push(TokenEvent(1, (10 + at,)))
    request.finish(None)
    assert [event async for event in request.events()] == [
        TokenEvent(0, (0, 1, 2), tuple(logprobs), "length"),
        TokenEvent(1, (10, 11, 12)),
    ]


async def test_who_reads_gets_each_event_as_it_came() -> None:
    request = running()
    events = request.events()
    for event in (TokenEvent(0, (1,)), TokenEvent(0, (), (), "eos")):
        request.push(event)
        assert await anext(events) == event


async def test_joined_or_not_a_client_holds_so_many_tokens_at_most() -> None:
    request = running()
    assert request.push(TokenEvent(0, (7,) * (MAX_HELD_IDS - 1)))
    assert request.push(TokenEvent(1, (7,)))
    assert not request.push(TokenEvent(0, (7,)))
    await anext(request.events())
    assert request.push(TokenEvent(0, (7,)))


class Taking:
    """Takes what it is offered, while it is `ready`; then somebody waits for the next event."""

    def __init__(self, request: RunningRequest) -> None:
        self.request = request
        self.ready = True
        self.taken: list[TokenEvent] = []
        request.offer(self.take)
        self.waiting = asyncio.create_task(self._next())

    async def _next(self) -> TokenEvent | None:
        event = await anext(self.request.events(), None)
        assert event is None or isinstance(event, TokenEvent)
        return event

    def take(self, event: TokenEvent) -> bool:
        if self.ready:
            self.taken.append(event)
        return self.ready


async def test_who_waits_is_not_woken_for_what_is_taken() -> None:
    taking = Taking(running())
    await asyncio.sleep(0)
    events = [TokenEvent(0, (1,)), TokenEvent(1, (2,)), TokenEvent(0, (3,))]
    assert all(taking.request.push(event) for event in events)
    assert taking.taken == events
    await asyncio.sleep(0)
    assert not taking.waiting.done()
    taking.request.finish(None)
    assert await taking.waiting is None


async def test_nothing_is_offered_while_nobody_waits_or_something_does() -> None:
    taking = Taking(running())
    assert taking.request.push(TokenEvent(0, (1,))), "before anybody waits"
    assert await taking.waiting == TokenEvent(0, (1,))
    taking.waiting = asyncio.create_task(taking._next())
    await asyncio.sleep(0)
    taking.ready = False
    assert taking.request.push(TokenEvent(0, (2,)))
    taking.ready = True
    assert taking.request.push(TokenEvent(0, (3,))), "it would overtake the one before"
    assert await taking.waiting == TokenEvent(0, (2, 3))
    assert taking.taken == []


async def test_the_end_that_a_worker_tells_is_for_who_waits() -> None:
    taking = Taking(running())
    await asyncio.sleep(0)
    end = TokenEvent(0, (1,), (), "length")
    assert taking.request.push(end)
    assert await taking.waiting == end
    assert taking.taken == []


async def test_an_error_in_taking_ends_this_request_and_nothing_else() -> None:
    request = running()

    def take(event: TokenEvent) -> bool:
        raise ZeroDivisionError

    waiting = Taking(request).waiting
    request.offer(take)
    await asyncio.sleep(0)
    assert request.push(TokenEvent(0, (1,)))
    with pytest.raises(ZeroDivisionError):
        await waiting
