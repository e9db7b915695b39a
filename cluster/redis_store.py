"""The desired counts in Redis (or Valkey): one hash per cluster. The one file that imports redis."""

import redis.asyncio
from redis.exceptions import RedisError

from cluster.core.errors import ConfigError
from cluster.store import Counts, StoreUnavailable, checked_counts

_TIMEOUT_S = 3.0


class RedisStore:
    """`headrace:<cluster>:desired`, role -> count. Every call gives up after 3 s: a store is never waited for."""

    def __init__(self, url: str, cluster: str) -> None:
        """Connects on first use. Raises ConfigError for a URL that is none; the message never holds its password."""
        self._key = f"headrace:{cluster}:desired"
        try:
            self._client = redis.asyncio.Redis.from_url(
                url, decode_responses=True, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
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


def _number(text: str | bytes) -> int | str | bytes:
    return int(text) if text.isdigit() else text
