"""The cluster secret: made once, readable by its owner only, compared in constant time."""

import stat
from pathlib import Path

import pytest

from cluster.config import (
    REDIS_VARIABLE,
    SECRET_VARIABLE,
    TENANTS_REDIS_VARIABLE,
    load_config,
    parse_config,
    with_secrets_from_environment,
)
from cluster.core.errors import ConfigError
from cluster.credentials import same_secret
from cluster.secret import cluster_secret, create_secret, read_secret


def test_made_once_with_mode_0600(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    first = create_secret(file)
    assert len(first) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert create_secret(file) == read_secret(file) == first
    assert create_secret(tmp_path / "other") != first


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    create_secret(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        read_secret(file)


@pytest.mark.parametrize("content", ["", "short", "non-ascii-é-is-not-a-header", "two lines\nare not one secret"])
def test_content_that_cannot_be_a_header_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.write_text(content, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="ASCII"):
        read_secret(file)


def test_the_environment_comes_first_and_none_at_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    in_file = create_secret(file)
    config = load_config(None, [f"secret_file={file}"])
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert cluster_secret(config) == in_file
    monkeypatch.setenv(SECRET_VARIABLE, "from-the-environment")
    assert cluster_secret(config) == "from-the-environment"
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with pytest.raises(ConfigError, match="secret_file"):
        cluster_secret(load_config())


def test_comparison() -> None:
    assert same_secret("abc", "abc")
    assert not same_secret("abd", "abc")
    assert not same_secret("", "abc")
    assert not same_secret("\udcff", "abc")


def test_a_redis_may_come_by_a_variable_and_the_configuration_s_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_VARIABLE, "redis://:pa55@one:6379")
    monkeypatch.setenv(TENANTS_REDIS_VARIABLE, "rediss://:pa55@two:6379")
    given = with_secrets_from_environment(parse_config("{}"))
    assert (given.store.redis_url, given.tenants_redis_url) == ("redis://:pa55@one:6379", "rediss://:pa55@two:6379")
    own = parse_config("{store: {redis_url: 'redis://a'}, tenants_redis_url: 'redis://b'}")
    assert with_secrets_from_environment(own) == own


@pytest.mark.parametrize("name", [REDIS_VARIABLE, TENANTS_REDIS_VARIABLE])
def test_a_variable_that_is_no_redis_is_named_and_not_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://:pa55@one:6379")
    with pytest.raises(ConfigError, match=name) as refused:
        with_secrets_from_environment(parse_config("{}"))
    assert "pa55" not in str(refused.value)
