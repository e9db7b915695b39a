"""Tenants in a store that all routers read, and `headrace key` writes: sha256 of keys, shares, limits, and no key.

What is stored is what stands under `tenants:` in a configuration, one entry a tenant, as JSON. An entry that cannot be
used is left out, and said so: one bad entry must not lock everybody else out.
"""

import json
from collections.abc import Mapping
from typing import Protocol

from cluster.config import parse_tenant
from cluster.core.access import TenantSettings
from cluster.core.errors import ConfigError

LEAST_PREFIX = 8  # characters of a digest by which a key is called; fewer might be another's tomorrow


class TenantStore(Protocol):
    """Raises StoreUnavailable while the store does not answer."""

    async def load(self) -> dict[str, str]:
        """Every tenant's entry, by name, as it is written there."""

    async def change(self, name: str, changes: Mapping[str, object], digest: str | None = None) -> TenantSettings:
        """Change settings of a tenant, and add a key when there is a `digest`. Raises ConfigError."""

    async def revoke(self, name: str, prefix: str) -> str:
        """Remove the key whose digest begins so; returns the digest. Raises ConfigError when it is not one."""

    async def close(self) -> None:
        """Let go of connections."""


def read_entry(name: str, text: str) -> TenantSettings:
    """A tenant as it was stored. Raises ConfigError, which does not repeat it."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"tenants.{name}: not what `headrace key` writes")
    return parse_tenant(name, values)


def write_entry(tenant: TenantSettings) -> str:
    """What differs from the defaults."""
    return tenant.model_dump_json(exclude_defaults=True)


def changed(name: str, text: str | None, changes: Mapping[str, object], digest: str | None) -> TenantSettings:
    """The tenant after a change; None: there was none. Raises ConfigError."""
    before = TenantSettings() if text is None else read_entry(name, text)
    if "keys" in changes:
        raise ConfigError("keys: `headrace key` makes them, and --revoke takes them away")
    keys = before.keys if digest is None else (*before.keys, digest)
    return parse_tenant(name, {**before.model_dump(), **changes, "keys": keys})


def without(name: str, text: str | None, prefix: str) -> tuple[TenantSettings, str]:
    """The tenant without the key whose digest begins with `prefix`, and that digest. Raises ConfigError."""
    before = TenantSettings() if text is None else read_entry(name, text)
    if len(prefix) < LEAST_PREFIX:
        raise ConfigError(f"{prefix}: at least {LEAST_PREFIX} characters of the key's sha256 are needed")
    if len(found := [digest for digest in before.keys if digest.startswith(prefix)]) != 1:
        raise ConfigError(f"{prefix}: {'no key' if not found else 'more than one key'} of {name} begins so")
    kept = tuple(digest for digest in before.keys if digest != found[0])
    return before.model_copy(update={"keys": kept}), found[0]
