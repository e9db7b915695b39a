"""What a tenant may ask per minute and at the same time, and the books that count it.

1. *Take.* A request that is about to be admitted takes a permit; all its limits are checked together, and none is
   charged when one refuses. Requests and tokens each have a bucket of one minute's worth that refills steadily. What a
   prompt costs is known and charged here; a prompt larger than the whole bucket passes when it is full.
2. *Settle.* When a request has ended its permit is free, and what it wrote is charged, or what it did not use is given
   back. So a bucket can go below zero; then the tenant waits until it has been refilled.
3. *Hold.* A permit lives for LEASE_S and is renewed meanwhile, so that those of a router that died come free.

Two books under one contract suite (tests/contract/test_quotas.py): one in this process, and Redis
(cluster/redis_store.py) where several routers share them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cluster.core.errors import Unavailable

LEASE_S = 15.0
CONCURRENCY_RETRY_S = 1.0  # when one of a tenant's own requests will have ended is not known
MINUTE_S = 60.0

Kind = Literal["requests", "tokens", "concurrency"]


class QuotasUnavailable(Unavailable):
    """The shared book does not answer. What is served goes on being served."""


@dataclass(frozen=True, slots=True)
class Quota:
    """None is no limit. Tokens are those of prompts and answers together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def unlimited(self) -> bool:
        return self == NO_LIMITS


NO_LIMITS = Quota()


@dataclass(frozen=True, slots=True)
class Take:
    """One request of a tenant. `permit` is ours, unique over all routers."""

    tenant: str
    quota: Quota
    permit: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit was met, and when it will be worth trying again."""

    kind: Kind
    retry_after_s: float


@dataclass(slots=True)
class Settlement:
    """What has ended of one tenant since it was last told: permits, and tokens beyond those taken (or fewer: < 0)."""

    quota: Quota
    permits: list[str] = field(default_factory=list)
    tokens: int = 0


class QuotaBook(Protocol):
    """Counts what tenants ask. Every call raises QuotasUnavailable."""

    async def take(self, take: Take) -> Refusal | None:
        """Take a permit, all or nothing. None: it is yours until it is settled, or not renewed any more."""

    async def settle(self, settlements: Mapping[str, Settlement]) -> None:
        """These have ended, by tenant. A permit that is not there any more is ignored."""

    async def hold(self, permits: Mapping[str, Sequence[str]]) -> None:
        """Renew the permits that are in use, by tenant; one that was forgotten is there again."""

    async def ping(self) -> None:
        """Whether the book answers."""

    async def close(self) -> None:
        """Let go of connections."""


@dataclass(slots=True)
class Bucket:
    """`per_minute` tokens at most, refilled steadily. May be in debt."""

    per_minute: int
    level: float
    at: float

    def level_at(self, now: float) -> float:
        return min(float(self.per_minute), self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S)

    def wait_s(self, wanted: float, now: float) -> float:
        """Until so much is there, or the bucket is full; 0 when it is now."""
        missing = min(wanted, float(self.per_minute)) - self.level_at(now)
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def charge(self, amount: float, now: float) -> None:
        self.level, self.at = min(float(self.per_minute), self.level_at(now) - amount), now


@dataclass(slots=True)
class _Account:
    """What one tenant has used. `permits`: until when each is held."""

    buckets: dict[Kind, Bucket] = field(default_factory=dict)
    permits: dict[str, float] = field(default_factory=dict)


class LocalQuotas:
    """In this process. `now`: seconds that never go back."""

    def __init__(self, now: Callable[[], float], lease_s: float = LEASE_S) -> None:
        self._now = now
        self._lease_s = lease_s
        self._accounts: dict[str, _Account] = {}

    async def take(self, take: Take) -> Refusal | None:
        """See QuotaBook."""
        refusal = self.would_refuse(take)
        if refusal is None:
            self.note(take)
        return refusal

    def would_refuse(self, take: Take) -> Refusal | None:
        """What `take` would answer; nothing is charged."""
        now, account = self._now(), self._account(take.tenant, take.quota)
        limit = take.quota.concurrency
        if limit is not None and sum(until > now for until in account.permits.values()) >= limit:
            return Refusal("concurrency", CONCURRENCY_RETRY_S)
        for kind, wanted in _costs(take):
            bucket = account.buckets.get(kind)
            if bucket is not None and (wait_s := bucket.wait_s(wanted, now)) > 0:
                return Refusal(kind, wait_s)
        return None

    def note(self, take: Take) -> None:
        """Charge it, whatever is left: somebody else has allowed it."""
        now, account = self._now(), self._account(take.tenant, take.quota)
        account.permits = {permit: until for permit, until in account.permits.items() if until > now}
        account.permits[take.permit] = now + self._lease_s
        for kind, wanted in _costs(take):
            if (bucket := account.buckets.get(kind)) is not None:
                bucket.charge(wanted, now)

    async def settle(self, settlements: Mapping[str, Settlement]) -> None:
        """See QuotaBook."""
        self.settle_now(settlements)

    def settle_now(self, settlements: Mapping[str, Settlement]) -> None:
        """The same, without waiting."""
        for tenant, settlement in settlements.items():
            account = self._account(tenant, settlement.quota)
            for permit in settlement.permits:
                account.permits.pop(permit, None)
            if (bucket := account.buckets.get("tokens")) is not None:
                bucket.charge(settlement.tokens, self._now())

    async def hold(self, permits: Mapping[str, Sequence[str]]) -> None:
        """See QuotaBook."""
        until = self._now() + self._lease_s
        for tenant, held in permits.items():
            self._accounts.setdefault(tenant, _Account()).permits.update(dict.fromkeys(held, until))

    async def ping(self) -> None:
        """See QuotaBook."""

    async def close(self) -> None:
        """See QuotaBook."""

    def _account(self, tenant: str, quota: Quota) -> _Account:
        """With the limits that this tenant has now: they may have changed since it asked last."""
        account = self._accounts.setdefault(tenant, _Account())
        limits: dict[Kind, int | None] = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute}
        for kind, limit in limits.items():
            if limit is None:
                account.buckets.pop(kind, None)
            elif kind in account.buckets:
                account.buckets[kind].per_minute = limit
            else:
                account.buckets[kind] = Bucket(limit, float(limit), self._now())
        return account


def _costs(take: Take) -> tuple[tuple[Kind, int], ...]:
    return ("requests", 1), ("tokens", take.tokens)
