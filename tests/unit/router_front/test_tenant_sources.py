"""Tenants change while requests run: keys come and go, and a file that cannot be used changes nothing."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from cluster.cli.keys import digest_of, new_key
from cluster.config import dump_config, load_config, with_secrets_from_environment
from cluster.core.access import TenantSettings
from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import ConfigError, Unauthenticated
from router.dispatcher import DispatcherCore
from router.fairness import Counters
from router.tenant_sources import TenantSources
from router.tenants import Tenants

ONE, OTHER, THIRD = new_key(), new_key(), new_key()


def written(path: Path, tenants: object) -> None:
    """Replaced whole, as mounted secrets are."""
    scratch = path.with_suffix(".new")
    scratch.write_text(yaml.safe_dump(tenants))
    scratch.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tenants.yaml"
    written(file, {"acme": {"keys": [digest_of(ONE)], "weight": 2.0}})
    return file


def opened(path: Path) -> TenantSources:
    settings = [f"tenants_file={path}", f"tenants.fixed.keys=[{digest_of(THIRD)}]"]
    return TenantSources(load_config(None, settings), "the secret")


def who(tenants: Tenants, key: str) -> str | None:
    try:
        return tenants.authenticate(f"Bearer {key}").name
    except Unauthenticated:
        return None


async def test_keys_come_and_go_and_those_of_the_configuration_stay(path: Path) -> None:
    file = opened(path)
    assert [who(file.tenants, key) for key in (ONE, OTHER, THIRD)] == ["acme", None, "fixed"]
    written(path, {"acme": {"keys": [digest_of(OTHER)]}, "new": {"operator": True}})
    assert who(file.tenants, OTHER) is None, "nobody has looked yet"
    await file.look_in_file()
    assert [who(file.tenants, key) for key in (ONE, OTHER, THIRD)] == [None, "acme", "fixed"]
    written(path, {})
    await file.look_in_file()
    assert [who(file.tenants, key) for key in (ONE, OTHER, THIRD)] == [None, None, "fixed"]


async def test_a_tenant_keeps_its_salt(path: Path) -> None:
    """Its prefixes are found again, whatever changes beside its name."""
    file = opened(path)
    before = file.tenants.authenticate(f"Bearer {ONE}")
    written(path, {"acme": {"keys": [digest_of(ONE)], "concurrency": 3}})
    await file.look_in_file()
    after = file.tenants.authenticate(f"Bearer {ONE}")
    assert after.salt == before.salt
    assert (before.quota.concurrency, after.quota.concurrency) == (None, 3)


async def test_weights_are_those_of_now(path: Path) -> None:
    """For everybody who was given them, the queue above all."""
    file = opened(path)
    counters: Counters[str] = Counters(file.tenants.weights)
    assert counters.weight("acme") == 2.0
    written(path, {"acme": {"weight": 5.0}, "new": {"weight": 3.0}})
    await file.look_in_file()
    assert [counters.weight(name) for name in ("acme", "new", "fixed")] == [5.0, 3.0, 1.0]


def test_a_file_without_a_tenant_opens_nothing(path: Path) -> None:
    written(path, {})
    tenants = TenantSources(load_config(None, [f"tenants_file={path}"]), "the secret").tenants
    assert tenants.configured
    assert who(tenants, ONE) is None
    assert not TenantSources(load_config(), "the secret").tenants.configured


@pytest.mark.parametrize(
    "content",
    [
        "acme: {keys: [",
        "- acme",
        "acme: {kees: []}",
        f"acme: {{keys: [{ONE}]}}",
        "ACME: {}",
        "fixed: {}",
        f"one: {{keys: [{digest_of(ONE)}]}}\nother: {{keys: [{digest_of(ONE)}]}}",
        f"one: {{keys: [{digest_of(THIRD)}]}}",
        None,
    ],
    ids=["no YAML", "a list", "an unknown field", "a key itself", "a wrong name", "one of ours", "two", "ours", "gone"],
)
async def test_what_cannot_be_used_changes_nothing_and_is_no_start(
    path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    caplog.set_level(logging.ERROR)
    file = opened(path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    await file.look_in_file()
    await file.look_in_file()
    assert who(file.tenants, ONE) == "acme"
    assert len(caplog.records) == 1
    assert ONE not in caplog.text
    assert digest_of(THIRD) not in caplog.text
    with pytest.raises(ConfigError, match=r"tenants\.yaml"):
        opened(path)


async def test_the_queue_goes_by_the_weights_of_now(path: Path) -> None:
    file = opened(path)
    core = DispatcherCore(RouterSettings(), TimingSettings(), 1, random.Random(0), weights=file.tenants.weights)
    written(path, {"acme": {"weight": 5.0}})
    await file.look_in_file()
    assert core._books.queue._lanes._counters.weight("acme") == 5.0


def test_tenants_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret of Kubernetes or systemd that is a variable; the programs' own file then holds its digests."""
    monkeypatch.setenv("HEADRACE_TENANTS", f"acme: {{keys: [{digest_of(ONE)}], weight: 2}}")
    config = with_secrets_from_environment(load_config(None, [f"tenants.fixed.keys=[{digest_of(THIRD)}]"]))
    assert [who(TenantSources(config, "the secret").tenants, key) for key in (ONE, THIRD)] == ["acme", "fixed"]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config, "a program has both, and tenants once"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acme: {kees: []}", "kees"),
        ("fixed: {}", "fixed"),
        (f"acme: {{keys: [{ONE}]}}", "keys"),
        ("acme: {keys: [", "YAML"),
    ],
    ids=["unknown key", "name that is taken", "key itself", "no YAML"],
)
def test_an_environment_that_cannot_be_used_is_named_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setenv("HEADRACE_TENANTS", text)
    with pytest.raises(ConfigError, match=f"HEADRACE_TENANTS.*{words}") as refused:
        with_secrets_from_environment(load_config(None, [f"tenants.fixed.keys=[{digest_of(THIRD)}]"]))
    assert ONE not in str(refused.value)


class Store:
    """A TenantStore in memory. `silent`: it is asked, and does not answer."""

    def __init__(self, **entries: str) -> None:
        self.entries = entries
        self.silent: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def load(self) -> dict[str, str]:
        self.asked.set()
        if self.silent is not None:
            await self.silent.wait()
        return dict(self.entries)

    async def change(self, name: str, changes: Mapping[str, object], digest: str | None = None) -> TenantSettings:
        raise NotImplementedError

    async def revoke(self, name: str, prefix: str) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        return


async def test_bad_entries_are_said_once_each_and_read_beside_streams(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(bad="no JSON", acme=json.dumps({"keys": [digest_of(ONE)]}))
    known = TenantSources(load_config(), "the secret", store)
    await known.start()
    for number in range(3):
        store.entries[f"other{number}"] = "{}"
        await known.look_in_store()
    store.entries["zzz"] = store.entries["acme"]  # its key is another tenant's
    await known.look_in_store()
    await known.look_in_store()
    said = [record.getMessage() for record in caplog.records]
    assert [message.split()[2] for message in said] == ["tenants.bad:", "tenants.zzz"]
    assert all(record.thread != threading.get_ident() for record in caplog.records), "not by the event loop"
    assert sorted(known.tenants.weights) == ["acme", "other0", "other1", "other2"]
    store.entries["bad"] = "{}"
    await known.look_in_store()
    store.entries["bad"] = "no JSON"
    await known.look_in_store()
    assert len(caplog.records) == 3, "it was right meanwhile"


async def test_the_file_does_not_wait_for_a_store_that_is_silent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    known = TenantSources(load_config(None, [f"tenants_file={path}"]), "the secret", store)
    await known.start()
    store.silent = asyncio.Event()
    store.asked.clear()
    taken, prepared = asyncio.Event(), known.tenants.prepared

    def watched(settings: Mapping[str, TenantSettings]) -> Callable[[], None]:
        take = prepared(settings)

        def then_tell() -> None:
            take()
            taken.set()

        return then_tell

    monkeypatch.setattr(known.tenants, "prepared", watched)
    following = asyncio.create_task(known.follow(0.0))
    try:
        await store.asked.wait()
        written(path, {"acme": {"keys": [digest_of(OTHER)]}})
        await asyncio.wait_for(taken.wait(), 10.0)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert who(known.tenants, ONE) is None
