"""The cluster secret: made once, readable by its owner only, compared in constant time."""

import stat
from pathlib import Path

import pytest

from cluster.config import SECRET_VARIABLE, load_config
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
