"""What is kept in Redis (or Valkey): the desired counts, tenants and what they have used, and Ray's own tables.

The one file that imports redis.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError, WatchError
from redis.retry import Retry

from cluster.core.access import TenantSettings
from cluster.core.errors import ConfigError
from cluster.quota_scripts import HOLD, SETTLE, TAKE
from cluster.quotas import CONCURRENCY_RETRY_S, LEASE_S, Kind, QuotasUnavailable, Refusal, Settlement, Take
from cluster.redis_url import RedisServer, parse_redis_url
from cluster.run_dir import RunDir
from cluster.store import Counts, StoreUnavailable, checked_counts
from cluster.tenant_store import changed, without, write_entry
from cluster.usage import KEEP_DAYS, NOTHING, OPEN_DAYS, Closed, Day, Rows, Sums, UsageUnavailable, Who, iso
from cluster.usage_scripts import FOLD, WRITE

_TIMEOUT_S = 3.0
_QUOTA_TIMEOUT_S = 0.25  # a request waits for it
_QUOTA_CONNECTIONS = 32  # of a router: a burst waits for one of them
_USAGE_TIMEOUT_S = 1.0  # the end of an answer waits for it, once
_BATCH = 500  # permits told at once
_RETRIES = 1  # at once: a connection that an earlier server closed; the client's own way is to wait for seconds
_KINDS: dict[str, Kind] = {"requests": "requests", "tokens": "tokens", "concurrency": "concurrency"}
_log = logging.getLogger(__name__)

T = TypeVar("T")


class RedisStore:
    """`headrace:<cluster>:desired`, role -> count. Every call gives up within seconds: a store is never waited for."""

    def __init__(self, url: str, cluster: str) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._key = f"headrace:{cluster}:desired"
        self._client = _connect(url, _TIMEOUT_S)

    async def load(self) -> Counts | None:
        try:
            found = await self._client.hgetall(self._key)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot read {self._key}: {type(error).__name__}") from error
        if not found:
            return None
        return checked_counts({role: _number(count) for role, count in found.items()}, self._key)

    async def save(self, counts: Counts) -> None:
        try:
            async with self._client.pipeline(transaction=True) as steps:
                steps.delete(self._key)
                steps.hset(self._key, mapping={str(role): count for role, count in counts.items()})
                await steps.execute()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot write {self._key}: {type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()


class RedisQuotas:
    """A cluster.quotas.QuotaBook that all routers share: `headrace:<cluster>:quota:{<tenant>}:buckets` and `:permits`.

    Keys and values hold tenants' names, numbers and permits of our own making, and nothing of what was asked (I6).
    Every call gives up after `timeout_s`. `now` (tests) replaces the server's clock.
    """

    def __init__(
        self, url: str, cluster: str, now: Callable[[], float] | None = None, *, timeout_s: float = _QUOTA_TIMEOUT_S
    ) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._prefix = f"headrace:{cluster}:quota:"
        self._client = _connect(url, timeout_s, _QUOTA_CONNECTIONS)
        self._now = now
        self._take, self._settle, self._hold = (self._client.register_script(lua) for lua in (TAKE, SETTLE, HOLD))

    async def take(self, take: Take) -> Refusal | None:
        """See QuotaBook."""
        quota = take.quota
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrency)
        answer = await self._run(
            self._take, take.tenant, take.permit, take.tokens, LEASE_S, *("" if n is None else n for n in limits)
        )
        if not answer:
            return None
        kind, wait = answer
        return Refusal(_KINDS[kind], float(wait) if wait else CONCURRENCY_RETRY_S)

    async def settle(self, settlements: Mapping[str, Settlement]) -> None:
        """See QuotaBook."""
        for tenant, settlement in settlements.items():
            limit = settlement.quota.tokens_per_minute
            first, *rest = _batches(settlement.permits)
            await self._run(self._settle, tenant, settlement.tokens, limit or "", *first)
            for more in rest:
                await self._run(self._settle, tenant, 0, "", *more)

    async def hold(self, permits: Mapping[str, Sequence[str]]) -> None:
        """See QuotaBook."""
        for tenant, held in permits.items():
            for some in _batches(held):
                await self._run(self._hold, tenant, LEASE_S, *some)

    async def ping(self) -> None:
        """Raises QuotasUnavailable while the server does not answer."""
        try:
            await self._client.ping()
        except (RedisError, OSError) as error:
            raise QuotasUnavailable(f"limits: {type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: AsyncScript, tenant: str, *values: str | float) -> list[str]:
        keys = [f"{self._prefix}{{{tenant}}}:{part}" for part in ("buckets", "permits")]
        now = "" if self._now is None else repr(self._now())
        try:
            answer: list[str] = await script(keys=keys, args=[now, *values])
        except (RedisError, OSError) as error:
            raise QuotasUnavailable(f"limits: {type(error).__name__}") from error
        return answer


class RedisUsage:
    """A cluster.usage.UsageBook that all routers share: `headrace:<cluster>:{usage}:<day>` and `...:unfolded`.

    Keys and values hold days, epochs, names of tenants and models, and numbers (I6). `now` (tests) replaces the
    server's clock, in Unix time. A write or a step of a fold is given up after `timeout_s`, with all its tries.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        now: Callable[[], float] | None = None,
        *,
        keep_days: int = KEEP_DAYS,
        timeout_s: float = _USAGE_TIMEOUT_S,
    ) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._prefix = f"headrace:{cluster}:{{usage}}:"
        self._client = _connect(url, timeout_s)
        self._timeout_s = timeout_s
        self._now = now
        self._keep_days = keep_days
        self._write, self._fold = (self._client.register_script(lua) for lua in (WRITE, FOLD))

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        """See UsageBook."""
        pairs = [
            text
            for who, sums in rows.items()
            for text in (f"{epoch:016x} {who.tenant} {who.model}", ",".join(map(str, sums)))
        ]
        today = await self._run(self._write, day, self._keep_days, *pairs)
        return None if today < 0 else Closed(today)

    async def read(self, since: Day, until: Day) -> dict[Day, dict[Who, Sums]]:
        """See UsageBook."""
        days = range(since, until + 1)
        try:
            async with self._client.pipeline(transaction=False) as steps:
                for day in days:
                    steps.hgetall(self._key(day))
                found = await steps.execute()
        except (RedisError, OSError) as error:
            raise UsageUnavailable(f"usage: {type(error).__name__}") from error
        return {day: _usage_of(day, fields) for day, fields in zip(days, found, strict=True) if fields}

    async def fold(self) -> None:
        """See UsageBook. What is older than is kept expires by itself."""
        days = await self._in_time(self._client.smembers(self._prefix + "unfolded"))
        for day in sorted(int(day) for day in map(str, days) if day.isdecimal()):
            await self._run(self._fold, day)

    async def close(self) -> None:
        await self._client.aclose()

    def _key(self, day: Day) -> str:
        return self._prefix + iso(day)

    async def _run(self, script: AsyncScript, day: Day, *values: str | int) -> int:
        keys = [self._key(day), self._prefix + "unfolded"]
        now = "" if self._now is None else repr(self._now())
        answer: int = await self._in_time(script(keys=keys, args=[now, day, OPEN_DAYS, *values]))
        return answer

    async def _in_time(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (RedisError, OSError) as error:
            raise UsageUnavailable(f"usage: {type(error).__name__}") from error


class RedisTenants:
    """A cluster.tenant_store.TenantStore: `headrace:<cluster>:tenants`, name -> settings with digests of keys."""

    def __init__(self, url: str, cluster: str) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._key = f"headrace:{cluster}:tenants"
        self._client = _connect(url, _TIMEOUT_S, key="tenants_redis_url")

    async def load(self) -> dict[str, str]:
        """See TenantStore."""
        try:
            found = await self._client.hgetall(self._key)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot read {self._key}: {type(error).__name__}") from error
        return {str(name): str(entry) for name, entry in found.items()}

    async def change(self, name: str, changes: Mapping[str, object], digest: str | None = None) -> TenantSettings:
        """See TenantStore."""
        return await self._rewrite(name, lambda text: (after := changed(name, text, changes, digest), after))

    async def revoke(self, name: str, prefix: str) -> str:
        """See TenantStore."""
        return await self._rewrite(name, lambda text: without(name, text, prefix))

    async def close(self) -> None:
        await self._client.aclose()

    async def _rewrite(self, name: str, rewrite: Callable[[str | None], tuple[TenantSettings, T]]) -> T:
        """Read, think, write: again, when somebody else wrote meanwhile."""
        try:
            while True:
                async with self._client.pipeline(transaction=True) as steps:
                    await steps.watch(self._key)
                    before = await steps.hget(self._key, name)
                    after, answer = rewrite(None if before is None else str(before))
                    steps.multi()  # type: ignore[no-untyped-call]
                    steps.hset(self._key, name, write_entry(after))
                    try:
                        await steps.execute()
                    except WatchError:
                        continue
                    return answer
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot write {self._key}: {type(error).__name__}") from error


class GcsTables:
    """The tables of one cluster's Ray, `RAY<namespace>@...`. Ray writes them; we look, and sweep up after it.

    Every call gives up within seconds and raises StoreUnavailable; no message holds the password.
    """

    def __init__(self, server: RedisServer, namespace: str) -> None:
        """Connects on first use."""
        self._where = f"Redis at {server.host}:{server.port}"
        self._prefix = f"RAY{namespace}@"
        self.server = server
        self._client = redis.Redis(
            host=server.host,
            port=server.port,
            username=server.username or None,
            password=server.password or None,
            ssl=server.tls,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), _RETRIES),
        )

    def there(self) -> bool:
        """Whether this cluster's tables are there: its node is, from the first second on."""
        try:
            return bool(self._client.exists(f"{self._prefix}NODE"))
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"{self._where} does not answer: {type(error).__name__}") from error

    def clear(self) -> None:
        """Remove them, and nobody else's."""
        try:
            for key in self._client.scan_iter(match=f"{self._prefix}*"):
                self._client.unlink(key)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot clear {self._where}: {type(error).__name__}") from error

    def close(self) -> None:
        """The cluster has left: its tables go too, now or at its next start."""
        try:
            self.clear()
        except StoreUnavailable as error:
            _log.warning("%s", error)
        self._client.close()


def gcs_tables(url: str, run_dir: RunDir) -> GcsTables:
    """The tables of this run directory's Ray on the server of `ray.redis_url`."""
    return GcsTables(parse_redis_url(url, "ray.redis_url"), run_dir.ray_namespace())


def _connect(
    url: str, timeout_s: float, connections: int = 4, *, key: str = "store.redis_url"
) -> "redis.asyncio.Redis":
    """Raises ConfigError for a URL that is none."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            decode_responses=True,
            encoding_errors="replace",  # somebody else's bytes are no text, and no reason to stop
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=redis.asyncio.retry.Retry(NoBackoff(), _RETRIES),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"{key}: not a URL like redis://:password@host:6379/0") from error


def _batches(permits: Sequence[str]) -> list[Sequence[str]]:
    """At least one, perhaps empty."""
    return [permits[start : start + _BATCH] for start in range(0, max(1, len(permits)), _BATCH)]


def _number(text: str | bytes) -> int | str | bytes:
    return int(text) if text.isdigit() else text


def _usage_of(day: Day, fields: Mapping[str, str]) -> dict[Who, Sums]:
    """A day's hash, all epochs added. What is none of ours is left out: it must not keep everybody from the rest."""
    total: dict[Who, Sums] = {}
    strange = 0
    for field, value in fields.items():
        try:
            _, tenant, model = field.split(" ", 2)
            sums = Sums(*map(int, value.split(",")))
        except (ValueError, TypeError):  # not three words; no number; more numbers than there are columns
            strange += 1
            continue
        who = Who(tenant, model)
        total[who] = total.get(who, NOTHING).plus(sums)
    if strange:
        _log.warning("usage of %s: %d fields that cannot be read are left out", iso(day), strange)
    return total
