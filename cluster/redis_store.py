"""What is kept in Redis (or Valkey): the desired counts, one hash per cluster, and Ray's own tables.

The one file that imports redis.
"""

import logging

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from cluster.core.errors import ConfigError
from cluster.redis_url import RedisServer, parse_redis_url
from cluster.run_dir import RunDir
from cluster.store import Counts, StoreUnavailable, checked_counts

_TIMEOUT_S = 3.0
_RETRIES = 1  # at once: a connection that an earlier server closed; the client's own way is to wait for seconds
_log = logging.getLogger(__name__)


class RedisStore:
    """`headrace:<cluster>:desired`, role -> count. Every call gives up within seconds: a store is never waited for."""

    def __init__(self, url: str, cluster: str) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._key = f"headrace:{cluster}:desired"
        try:
            self._client = redis.asyncio.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=redis.asyncio.retry.Retry(NoBackoff(), _RETRIES),
            )
        except ValueError as error:
            raise ConfigError("store.redis_url: not a URL like redis://:password@host:6379/0") from error

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


def _number(text: str | bytes) -> int | str | bytes:
    return int(text) if text.isdigit() else text
