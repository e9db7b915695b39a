"""Tenants from the configuration and from a file of their own, which is looked at every second (`tenants_file`)."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from cluster.config import load_tenants
from cluster.core.access import TenantSettings
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.reread import Reread
from router.tenants import Tenants

LOOK_S = 1.0


class TenantsFile:
    """The tenants of a cluster, kept as their file says. A file that cannot be used changes nothing."""

    def __init__(self, config: ClusterConfig, secret: str) -> None:
        """Raises ConfigError when there is a file that cannot be used."""
        self._newest: Reread[dict[str, TenantSettings]] | None = None
        settings: Mapping[str, TenantSettings] = config.tenants
        if config.tenants_file is not None:
            path = Path(config.tenants_file)
            try:
                self._newest = Reread([path], lambda: load_tenants(path, config.tenants))
            except ValueError as error:
                raise ConfigError(f"tenants_file: {path}: {error}") from error
            settings = self._newest.current()
        self._told = settings
        self.tenants = Tenants(settings, secret, locked=self._newest is not None)

    def look(self) -> None:
        """Take what is new."""
        if self._newest is not None:
            self._take(self._newest.current())

    async def follow(self) -> None:
        """Look again and again, in a thread: streams do not wait for a long file. Until cancelled."""
        while self._newest is not None:
            await asyncio.sleep(LOOK_S)
            self._take(await asyncio.to_thread(self._newest.current))
        await asyncio.Event().wait()

    def _take(self, now: Mapping[str, TenantSettings]) -> None:
        if now is not self._told:
            self._told = now
            self.tenants.replace(now)
