"""What waits for a client that does not read: one event a sample, the same tokens, and a bound."""

import random

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
