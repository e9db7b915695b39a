"""The router's shell: what the core refuses is one client's affair, what it cannot explain ends this life."""

import asyncio
import random

import pytest

from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import HeadraceError, IntegrityError, Overloaded
from cluster.credentials import Credentials
from router.dispatcher import DispatcherCore
from router.effects import Effect
from router.requests import Request
from router.runtime import RouterRuntime

REQUEST = Request(request_id="r", public_id="p", prompt=(1, 2, 3), max_tokens=4)


def runtime(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> RouterRuntime:
    core = DispatcherCore(RouterSettings(), TimingSettings(), 1, random.Random(0))

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(core, method, fail)
    return RouterRuntime(core, ManualClock(), epoch=1, credentials=Credentials("a secret"))


def refuse_what_is_no_effect(effects: list[Effect]) -> None:
    if effects:
        raise IntegrityError("an effect that is none")


@pytest.mark.parametrize("method", ["add_request", "cancel", "stop"])
@pytest.mark.parametrize("error", [IntegrityError("books"), RuntimeError("bug")], ids=["books", "bug"])
async def test_an_error_of_our_own_ends_this_life(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    router = runtime(monkeypatch, method, error)
    with pytest.raises(type(error)):
        async with router.run(REQUEST) as running:
            running.stop(0)
    with pytest.raises(type(error)):
        await asyncio.wait_for(router.serve(), 5)


async def test_a_request_whose_admission_cannot_be_acted_upon_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    core = DispatcherCore(RouterSettings(), TimingSettings(), 1, random.Random(0))
    left: list[str] = []

    def cancel(request_id: str, now: float) -> list[Effect]:
        left.append(request_id)
        return []

    monkeypatch.setattr(core, "add_request", lambda *_: [object()])
    monkeypatch.setattr(core, "cancel", cancel)
    router = RouterRuntime(core, ManualClock(), epoch=1, credentials=Credentials("a secret"))
    monkeypatch.setattr(router, "_apply", refuse_what_is_no_effect)
    with pytest.raises(IntegrityError):
        async with router.run(REQUEST):
            pass
    assert left == ["r"]


async def test_a_refusal_is_the_clients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    router = runtime(monkeypatch, "add_request", Overloaded("full", retry_after_s=1.0))
    with pytest.raises(HeadraceError):
        async with router.run(REQUEST):
            pass
    serving = asyncio.ensure_future(router.serve())
    done, _ = await asyncio.wait({serving}, timeout=0.3)
    assert not done
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
