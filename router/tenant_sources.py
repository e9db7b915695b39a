"""Where tenants come from: the configuration, a file of their own, and a store that all routers read.

The file (`tenants_file`) and the store (`tenants_redis_url`) are looked at every second. What cannot be used or read
changes nothing, and is said once. A name or a key belongs to whoever has it first, in this order: configuration and
file, which must not contradict each other, then the store.
"""

import asyncio
import logging
from collections.abc import Mapping
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
        self._away = False
        self.tenants = Tenants(self._own, secret, locked=self._newest is not None or store is not None)

    async def start(self) -> None:
        """Read the store for the first time. Raises StoreUnavailable: without it nobody in it could be told apart."""
        if self._store is not None:
            self._take(self._own, await self._store.load())

    def look(self) -> None:
        """Take what is new in the file."""
        if self._newest is not None:
            self._take(self._newest.current(), self._stored)

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
        self._take(self._own, found)

    async def follow(self) -> None:
        """Look again and again, in a thread: streams do not wait for a long file. Until cancelled."""
        while self._newest is not None or self._store is not None:
            await asyncio.sleep(LOOK_S)
            if self._newest is not None:
                self._take(await asyncio.to_thread(self._newest.current), self._stored)
            await self.look_in_store()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let go of connections."""
        if self._store is not None:
            await self._store.close()

    def _take(self, own: Mapping[str, TenantSettings], stored: Mapping[str, str]) -> None:
        if own is not self._own or stored != self._stored:
            self._own, self._stored = own, stored
            self.tenants.replace(together(own, stored))


def together(own: Mapping[str, TenantSettings], stored: Mapping[str, str]) -> dict[str, TenantSettings]:
    """All tenants; entries of the store that cannot be used are left out and logged."""
    every = dict(own)
    taken = {digest for tenant in own.values() for digest in tenant.keys}
    for name in sorted(stored):
        try:
            tenant = read_entry(name, stored[name])
        except ConfigError as error:
            _log.error("left out: %s", error)
            continue
        if name in own or not taken.isdisjoint(tenant.keys):
            _log.error("left out: tenants.%s in the store: its name or one of its keys is another tenant's", name)
            continue
        taken.update(tenant.keys)
        every[name] = tenant
    return every
