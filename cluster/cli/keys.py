"""`headrace key`: API keys of tenants. A key is shown once; what is configured or stored is its sha256 alone."""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config import load_config, parse_settings, parse_tenant
from cluster.core.access import TenantSettings
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.run_dir import run_dir_of
from cluster.tenant_store import TenantStore, read_entry

PREFIX = "hr-"
"""Tells people, and tools that look for secrets in files, what it is."""

_BYTES = 32
_SHOWN = 12  # characters of a digest: enough to call a key by

T = TypeVar("T")


def key(
    tenant: Annotated[str, typer.Argument(help="whose key it will be")] = "NAME",
    in_redis: Annotated[bool, typer.Option("--redis", help="store it where `tenants_redis_url` says")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="with --redis, of the tenant: weight=2")] = None,
    revoke: Annotated[str | None, typer.Option("--revoke", help="take away the key whose sha256 begins so")] = None,
    listing: Annotated[bool, typer.Option("--list", help="the tenants in Redis, and their keys")] = False,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="cluster.yaml; else the cluster's own")] = None,
    name: Annotated[str, typer.Option("--name", help="which cluster")] = "headrace",
    root: Annotated[Path | None, typer.Option("--root", help="where run directories are (~/.headrace)")] = None,
) -> None:
    """Make an API key. The first line is the key, for the client; the second is what the configuration needs.

    With --redis nothing has to be configured: all routers know the key a second later.
    """
    if in_redis or listing or revoke is not None:
        config = load_config(file) if file is not None else run_dir_of(root, name).config()
        _in_store(config, tenant, settings or (), revoke, listing=listing)
        return
    if settings:
        raise ConfigError("--set: only with --redis; else settings of a tenant stand beside its keys")
    made = new_key()
    print(made)
    print(f"--set 'tenants.{tenant}.keys=[{digest_of(made)}]'")


def _in_store(
    config: ClusterConfig, tenant: str, settings: list[str] | tuple[()], revoke: str | None, *, listing: bool
) -> None:
    told = Console(stderr=True)
    if listing:
        Console().print(table(_with_store(config, lambda store: store.load())))
    elif revoke is not None:
        parse_tenant(tenant, {})
        digest = _with_store(config, lambda store: store.revoke(tenant, revoke))
        told.print(f"{tenant}: the key {digest[:_SHOWN]}… is refused from now on")
    else:
        made, changes = new_key(), parse_settings(settings)
        after = _with_store(config, lambda store: store.change(tenant, changes, digest_of(made)))
        print(made)
        told.print(
            f"{tenant}: {len(after.keys)} key{'s' * (len(after.keys) > 1)}, this one {digest_of(made)[:_SHOWN]}…"
        )


def _with_store(config: ClusterConfig, call: Callable[[TenantStore], Awaitable[T]]) -> T:
    if config.tenants_redis_url is None:
        raise ConfigError("tenants_redis_url: not set, so no router would look there")
    # Imported only where it is used, as in the programs.
    from cluster.redis_store import RedisTenants

    url = config.tenants_redis_url

    async def run() -> T:
        store = RedisTenants(url, config.name)
        try:
            return await call(store)
        finally:
            await store.close()

    return asyncio.run(run())


def table(entries: Mapping[str, str]) -> Table:
    """One line a tenant; an entry that routers leave out says why."""
    shown = Table("tenant", "keys", "weight", "requests/min", "tokens/min", "at once", "operator", box=None)
    for name, text in sorted(entries.items()):
        try:
            shown.add_row(escape(name), *_row(read_entry(name, text)))
        except ConfigError as error:
            shown.add_row(escape(name), f"[red]left out: {escape(str(error))}[/]")
    return shown


def _row(tenant: TenantSettings) -> list[str]:
    limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrency)
    keys = ", ".join(digest[:_SHOWN] for digest in tenant.keys) or "none"
    return [keys, f"{tenant.weight:g}", *("-" if n is None else str(n) for n in limits), "yes" * tenant.operator or "-"]


def new_key() -> str:
    """256 random bits: nothing that could be guessed from its sha256."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest_of(made: str) -> str:
    """What is configured of a key: its sha256, in hex."""
    return hashlib.sha256(made.encode()).hexdigest()
