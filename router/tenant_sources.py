"""Where tenants come from: the configuration, a file of their own, and a store that all routers read.

The file (`tenants_file`) and the store (`tenants_redis_url`) are looked at every second. What cannot be used or read
changes nothing, and is said once. A name or a key belongs to whoever has it first, in this order: configuration and
file, which must not contradict each other, then the store.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from cluster.config import load_tenants
from cluster.core.access import TenantSettings
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError, Unavailable
from cluster.reread import Reread
from cluster.tenant_store import TenantStore, read_entry
from router.tenants import Tenants

LOOK_S = 1.0
_log = logging.getLogger(__name__)


class TenantSources:
    """The tenants of a cluster, as all that tell of them say now."""

    def __init__(self, config: ClusterConfig, secret: str, store: TenantStore | None = None) -> None:
        """Raises ConfigError when there is a file that cannot be used."""
        self._newest: Reread[dict[str, TenantSettings]] | None = None
        self._own: Mapping[str, TenantSettings] = config.tenants
        if config.tenants_file is not None:
            path = Path(config.tenants_file)
            try:
                self._newest = Reread([path], lambda: load_tenants(path, config.tenants))
            except ValueError as error:
                raise ConfigError(f"tenants_file: {path}: {error}") from error
            self._own = self._newest.current()
        self._store = store
        self._stored: Mapping[str, str] = {}
        self._entries = Entries()
        self._taking = asyncio.Lock()
        self._away = False
        self.tenants = Tenants(self._own, secret, locked=self._newest is not None or store is not None)

    async def start(self) -> None:
        """Read the store for the first time. Raises StoreUnavailable: without it nobody in it could be told apart."""
        if self._store is not None:
            await self._take(stored=await self._store.load())

    async def look_in_file(self) -> None:
        """Take what is new in the file."""
        if self._newest is not None:
            await self._take(own=await asyncio.to_thread(self._newest.current))

    async def look_in_store(self) -> None:
        """Take what is new in the store; while it is away everything stays as it is."""
        if self._store is None:
            return
        try:
            found = await self._store.load()
        except Unavailable as error:
            if not self._away:
                _log.warning("tenants stay as they are: %s", error)
            self._away = True
            return
        self._away = False
        await self._take(stored=found)

    async def follow(self, every_s: float = LOOK_S) -> None:
        """Look again and again, until cancelled. The file does not wait for a store that is away."""

        async def again(look: Callable[[], Awaitable[None]]) -> None:
            while True:
                await asyncio.sleep(every_s)
                await look()

        looks = [self.look_in_file] * (self._newest is not None) + [self.look_in_store] * (self._store is not None)
        await asyncio.gather(asyncio.Event().wait(), *(again(look) for look in looks))

    async def close(self) -> None:
        """Let go of connections."""
        if self._store is not None:
            await self._store.close()

    async def _take(
        self, *, own: Mapping[str, TenantSettings] | None = None, stored: Mapping[str, str] | None = None
    ) -> None:
        """None: as it was. Made of them in a thread: streams do not wait for thousands of tenants."""
        async with self._taking:
            own = self._own if own is None else own
            stored = self._stored if stored is None else stored
            if own is not self._own or stored != self._stored:
                take = await asyncio.to_thread(self._prepared, own, stored)
                self._own, self._stored = own, stored
                take()

    def _prepared(self, own: Mapping[str, TenantSettings], stored: Mapping[str, str]) -> Callable[[], None]:
        return self.tenants.prepared(self._entries.together(own, stored))


class Entries:
    """What the store has, read: each entry once, until it changes."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[str, TenantSettings | ConfigError]] = {}
        self._said: set[str] = set()

    def together(self, own: Mapping[str, TenantSettings], stored: Mapping[str, str]) -> dict[str, TenantSettings]:
        """All tenants. Entries that cannot be used are left out, which is logged once for as long as it is so."""
        self._read = {name: self._reading(name, stored[name]) for name in sorted(stored)}
        every = dict(own)
        taken = {digest for tenant in own.values() for digest in tenant.keys}
        wrong = []
        for name, (_, tenant) in self._read.items():
            if isinstance(tenant, ConfigError):
                wrong.append(str(tenant))
            elif name in own or not taken.isdisjoint(tenant.keys):
                wrong.append(f"tenants.{name} in the store: its name or one of its keys is another tenant's")
            else:
                taken.update(tenant.keys)
                every[name] = tenant
        for problem in wrong:
            if problem not in self._said:
                _log.error("left out: %s", problem)
        self._said = set(wrong)
        return every

    def _reading(self, name: str, text: str) -> tuple[str, TenantSettings | ConfigError]:
        known = self._read.get(name)
        if known is not None and known[0] == text:
            return known
        try:
            return text, read_entry(name, text)
        except ConfigError as error:
            return text, error
