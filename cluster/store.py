"""The desired counts: how many programs of each role there should be. The only authority on replicas (DESIGN §8).

Two implementations under one contract suite (tests/contract/test_store.py): a file in the run directory, and Redis
(cluster/redis_store.py) where a controller may come back on another machine.
"""

import json
import os
from pathlib import Path
from typing import Protocol

from cluster.core.config import ClusterConfig
from cluster.core.errors import Unavailable
from cluster.pipe import ROLES, Role

Counts = dict[Role, int]


class StoreUnavailable(Unavailable):
    """The store cannot be reached, or what it holds cannot be understood. What runs goes on running."""


class DesiredStore(Protocol):
    """Keeps the desired counts of one cluster. Both calls raise StoreUnavailable."""

    async def load(self) -> Counts | None:
        """The counts last saved; None when none ever were."""

    async def save(self, counts: Counts) -> None:
        """Replace the counts, all or nothing."""

    async def close(self) -> None:
        """Let go of connections."""


class FileStore:
    """A JSON file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def load(self) -> Counts | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StoreUnavailable(f"cannot read {self._path}: {error}") from error
        try:
            return checked_counts(json.loads(text), str(self._path))
        except json.JSONDecodeError as error:
            raise StoreUnavailable(f"{self._path} does not hold counts: {error}") from error

    async def save(self, counts: Counts) -> None:
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            scratch.write_text(json.dumps(counts) + "\n", encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self._path}: {error}") from error

    async def close(self) -> None:
        return None


def checked_counts(value: object, origin: str) -> Counts:
    """Counts that came from outside. Raises StoreUnavailable for anything else than role -> number."""
    if not isinstance(value, dict):
        raise StoreUnavailable(f"{origin} does not hold counts")
    counts: Counts = {}
    for role in ROLES:
        count = value.get(role, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise StoreUnavailable(f"{origin}: {role}: {count!r} is no count")
        counts[role] = count
    if unknown := set(value) - set(ROLES):
        raise StoreUnavailable(f"{origin}: unknown roles {', '.join(sorted(map(repr, unknown)))}")
    return counts


def initial_counts(config: ClusterConfig) -> Counts:
    """What a new cluster starts with: the configuration's replicas."""
    return {
        "prefill": config.pools.prefill.replicas,
        "decode": config.pools.decode.replicas,
        "router": config.router.replicas,
    }


def open_store(config: ClusterConfig, file: Path) -> DesiredStore:
    """The store that the configuration asks for: Redis when it has a URL, `file` otherwise."""
    if config.store.redis_url is None:
        return FileStore(file)
    # Imported only where it is used: a cluster without Redis should not pay for the client.
    from cluster.redis_store import RedisStore

    return RedisStore(config.store.redis_url, config.name)
