"""The URL of a Redis (or Valkey) server as plain values: Ray and the Redis client each spell a server differently."""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from cluster.core.errors import ConfigError

_DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisServer:
    """One server, database 0. Empty `username` and `password`: none is needed."""

    host: str
    port: int
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def ray_address(self) -> str:
        """As Ray wants it in RAY_REDIS_ADDRESS; user and password go another way."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}"


def parse_redis_url(url: str, key: str) -> RedisServer:
    """Raises ConfigError, which names the key and never the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in ("redis", "rediss"):
        raise ConfigError(f"{key}: not a URL like redis://:password@host:6379")
    if parts.path not in ("", "/", "/0") or parts.query:
        raise ConfigError(f"{key}: only database 0 can be used, and no options")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return RedisServer(host, port or _DEFAULT_PORT, parts.scheme == "rediss", user, password)


def without_password(url: str | None) -> str | None:
    """The URL as people may see it."""
    if url is None:
        return None
    before, at, host = url.rpartition("@")
    return f"{before.partition('://')[0]}://***@{host}" if at else url
