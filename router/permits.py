"""Limits of tenants as the front door meets them: a permit around every request, whoever keeps the book (DESIGN §4.3).

    permits = Permits(SystemClock(), shared)
    keeping = asyncio.create_task(permits.serve())
    async with permits.hold(tenant, prompt_tokens) as permit:
        permit.written = 17                               # charged when the context is left

1. *Alone* (no shared book) the limits are this router's.
2. *Together* every permit is asked of the shared book, in one round trip; what has ended is told to it in the
   background, in one message for all that ended meanwhile. A router counts what it has let in for itself too.
3. *Without the book* (it does not answer within a quarter of a second, once) requests are let in by this router's own
   count at once, or refused where `fail_closed` says so. The book is tried again every PROBE_S; when it answers it is
   told what is held and what was used, and is asked again from then on.

A tenant that has used up its requests is refused without asking anybody until one comes free. Only names of tenants and
numbers are logged.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from cluster.core.clock import Clock
from cluster.core.errors import Overloaded, RateLimited, Unavailable
from cluster.core.ids import new_request_id
from cluster.quotas import LEASE_S, LocalQuotas, Quota, QuotaBook, QuotasUnavailable, Refusal, Settlement, Take
from router.tenants import Tenant

PROBE_S = 1.0
RENEW_S = LEASE_S / 3
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Permit:
    """One request that was let in. `written`: tokens of its answer."""

    take: Take | None = None
    written: int = 0


class Permits:
    """One per router. `shared` None: this router's limits are all there are. `serve` must run with a shared book."""

    def __init__(self, clock: Clock, shared: QuotaBook | None = None, *, fail_closed: bool = False) -> None:
        self._clock = clock
        self._local = LocalQuotas(clock.now, lease_s=math.inf)  # they end with their requests, or with us
        self._shared = shared
        self._fail_closed = fail_closed
        self._held: dict[str, dict[str, Take]] = {}
        self._ended: dict[str, Settlement] = {}
        self._closed_until: dict[str, tuple[Quota, float]] = {}
        self._news = asyncio.Event()
        self._renewed = clock.now()
        self.shared_up = shared is not None

    @property
    def shared(self) -> bool:
        """Whether there is a shared book."""
        return self._shared is not None

    @property
    def well(self) -> bool:
        """Whether limits are kept as they are meant to be: it answered last time, or there is none."""
        return self._shared is None or self.shared_up

    def held(self) -> int:
        """Permits in use."""
        return sum(map(len, self._held.values()))

    def check(self, tenant: Tenant) -> None:
        """Raises RateLimited while it is known that this tenant has no request left; costs nothing."""
        quota, until = self._closed_until.get(tenant.name, (tenant.quota, 0.0))
        if quota == tenant.quota and (left := until - self._clock.now()) > 0:
            raise _refused(Refusal("requests", left))

    def hold(self, tenant: Tenant, prompt_tokens: int) -> AbstractAsyncContextManager[Permit]:
        """Around one request. Raises RateLimited at a limit, Unavailable when it must be asked and cannot be."""
        return nullcontext(Permit()) if tenant.quota.unlimited else self._hold(tenant, prompt_tokens)

    @asynccontextmanager
    async def _hold(self, tenant: Tenant, prompt_tokens: int) -> AsyncIterator[Permit]:
        permit = Permit()
        self.check(tenant)
        permit.take = Take(tenant.name, tenant.quota, new_request_id(), prompt_tokens)
        await self._take(permit.take)
        try:
            yield permit
        except (Overloaded, Unavailable):  # turned away: its prompt was not read
            permit.written -= prompt_tokens
            raise
        finally:
            self._settle(permit.take, permit.written)

    async def serve(self) -> None:
        """Tell the shared book what has ended and what is held, until cancelled."""
        if self._shared is None:
            await asyncio.Event().wait()
        try:
            while True:
                await self.tell()
                await self._wait()
        finally:
            if self._shared is not None:
                await self._shared.close()

    async def tell(self) -> None:
        """One message to the shared book, with all there is to tell; notes whether it answers."""
        if self._shared is None:
            return
        self._news.clear()
        ended, self._ended = self._ended, {}
        now = self._clock.now()
        renew = not self.shared_up or now - self._renewed >= RENEW_S
        try:
            if not ended or not self.shared_up:  # what was used must not be charged again with every try
                await self._shared.ping()
            if ended:
                await self._shared.settle(ended)
            ended = {}
            if renew:
                await self._shared.hold({tenant: list(takes) for tenant, takes in self._held.items() if takes})
        except QuotasUnavailable as error:
            self._lost(error)
        else:
            if renew:
                self._renewed = now
            if not self.shared_up:
                _log.warning("limits are shared with other routers again")
            self.shared_up = True
        finally:  # what was not told, or perhaps not, is told next time: better twice than never
            for tenant, settlement in ended.items():
                self._note_ended(tenant, settlement)

    async def _take(self, take: Take) -> None:
        """Raises RateLimited, or QuotasUnavailable."""
        refusal = await self._ask(take)
        if refusal is None:
            self._held.setdefault(take.tenant, {})[take.permit] = take
            return
        if refusal.kind == "requests":
            self._closed_until[take.tenant] = take.quota, self._clock.now() + refusal.retry_after_s
        raise _refused(refusal)

    async def _ask(self, take: Take) -> Refusal | None:
        if self._shared is not None and self.shared_up:
            try:
                refusal = await self._shared.take(take)
            except QuotasUnavailable as error:
                self._lost(error)
            except asyncio.CancelledError:  # it may have been given all the same
                self._note_ended(take.tenant, Settlement(take.quota, [take.permit]))
                raise
            else:
                if refusal is None:
                    self._local.note(take)
                return refusal
        if self._shared is not None and self._fail_closed:
            raise QuotasUnavailable("whether this is within your limits cannot be told now")
        return await self._local.take(take)

    def _settle(self, take: Take, written: int) -> None:
        held = self._held[take.tenant]
        del held[take.permit]
        if not held:
            del self._held[take.tenant]
        settlement = Settlement(take.quota, [take.permit], written)
        self._local.settle_now({take.tenant: settlement})
        if self._shared is not None:
            self._note_ended(take.tenant, settlement)

    def _note_ended(self, tenant: str, settlement: Settlement) -> None:
        known = self._ended.setdefault(tenant, Settlement(settlement.quota))
        known.permits += settlement.permits
        known.tokens += settlement.tokens
        if not self.shared_up:  # they run out by themselves; only what was used is still worth telling
            known.permits.clear()
        self._news.set()

    async def _wait(self) -> None:
        if not self.shared_up:
            await asyncio.sleep(PROBE_S)
            return
        try:
            await asyncio.wait_for(self._news.wait(), RENEW_S)
        except TimeoutError:
            return

    def _lost(self, error: QuotasUnavailable) -> None:
        if self.shared_up:
            kept = "tenants with limits are refused" if self._fail_closed else "each router counts for itself"
            _log.warning("the store of limits does not answer (%s): %s until it does", error, kept)
        self.shared_up = False


def _refused(refusal: Refusal) -> RateLimited:
    per_minute = {"requests": "requests per minute", "tokens": "tokens per minute"}
    limit = per_minute.get(refusal.kind, "requests at the same time")
    return RateLimited(f"the limit of {limit} is reached", retry_after_s=refusal.retry_after_s)
