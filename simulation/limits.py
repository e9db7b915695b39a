"""The limits of tenants in simulation: the book that all routers share, and the permits of each (router/permits.py).

The code is the real one. Nothing of it ever waits here: a book answers within the same event, or is away and says so.
So its coroutines are run to their end on the spot, and `Permits.serve` becomes a timer.
"""

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

from cluster.quotas import LEASE_S, LocalQuotas, Quota, QuotasUnavailable, Refusal, Settlement, Take
from router.permits import PROBE_S, RENEW_S, Permit, Permits
from router.tenants import Tenant
from simulation.loop import Loop
from simulation.process import Process

LONGEST_LEASE_S = LEASE_S + PROBE_S + 1.0
"""A permit that nobody holds any more is free again after this time, whatever happened."""
_ROUND_TRIP_S = (0.0002, 0.02)
T = TypeVar("T")


def at_once(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits, and nothing here may")


class SharedBook:
    """A store that every router reaches, and that is away now and then: it refuses, or its answers are lost."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._book = LocalQuotas(loop.clock.now)
        self._back_at = 0.0
        self._deaf = True

    def leave(self, seconds: float, *, deaf: bool) -> None:
        """Nobody gets an answer for a while; what was asked is done all the same, unless it is `deaf`."""
        self._back_at = self._loop.now + seconds
        self._deaf = deaf

    def holds(self, tenant: Tenant) -> bool:
        """Whether any permit of a tenant is taken."""
        refusal = self._book.would_refuse(Take(tenant.name, Quota(concurrency=1), "a question", 0))
        return refusal is not None and refusal.kind == "concurrency"

    async def take(self, take: Take) -> Refusal | None:
        self._hear()
        refusal = await self._book.take(take)
        self._answer()
        return refusal

    async def settle(self, settlements: Mapping[str, Settlement]) -> None:
        self._hear()
        await self._book.settle(settlements)
        self._answer()

    async def hold(self, permits: Mapping[str, Sequence[str]]) -> None:
        self._hear()
        await self._book.hold(permits)
        self._answer()

    async def ping(self) -> None:
        self._hear()
        self._answer()

    async def close(self) -> None:
        pass

    def _hear(self) -> None:
        if self._loop.now < self._back_at and self._deaf:
            raise QuotasUnavailable("the simulation wants it so")

    def _answer(self) -> None:
        if self._loop.now < self._back_at:
            raise QuotasUnavailable("the answer is lost")


class Held:
    """A permit of one call, until `leave`."""

    def __init__(self, hold: AbstractAsyncContextManager[Permit]) -> None:
        self._hold = hold
        self._permit = at_once(_enter(hold))

    def leave(self, written: int, error: Exception | None) -> None:
        """The call has ended: its answers had so many tokens, and this is what went wrong."""
        self._permit.written = written
        at_once(_leave(self._hold, error))


class Gatekeeper:
    """The permits of one router, told to the shared book as `Permits.serve` does."""

    def __init__(self, process: Process, shared: SharedBook | None, *, fail_closed: bool) -> None:
        self.permits = Permits(process.loop.clock, shared, fail_closed=fail_closed)
        self._process = process
        self._shared = shared
        self._rounds = 0

    def start(self) -> None:
        if self._shared is not None:
            self._tell(self._rounds)

    def take(self, tenant: Tenant, prompt_tokens: int) -> Held:
        """A permit for one call. Raises RateLimited, QuotasUnavailable."""
        self.permits.check(tenant)
        return Held(self.permits.hold(tenant, prompt_tokens))

    def ended(self) -> None:
        """There is something to tell."""
        if self._shared is not None and self.permits.shared_up:
            seconds = self._process.loop.random.uniform(*_ROUND_TRIP_S)
            self._process.timer(seconds, partial(self._tell, self._rounds))

    def _tell(self, asked_in: int) -> None:
        if asked_in != self._rounds:
            return  # it was told meanwhile
        self._rounds += 1
        at_once(self.permits.tell())
        seconds = RENEW_S if self.permits.shared_up else PROBE_S
        self._process.timer(seconds, partial(self._tell, self._rounds))


async def _enter(hold: AbstractAsyncContextManager[Permit]) -> Permit:
    return await hold.__aenter__()


async def _leave(hold: AbstractAsyncContextManager[Permit], error: Exception | None) -> None:
    await hold.__aexit__(None if error is None else type(error), error, None)
