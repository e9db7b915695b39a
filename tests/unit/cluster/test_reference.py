"""docs/configuration.md is what the typed settings say, and every key says what it does."""

import re
from pathlib import Path

import pytest
from pydantic import Field
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import load_config, parse_config
from cluster.core.settings import Settings
from cluster.redis_url import without_password
from cluster.reference import reference, undescribed

ROOT = Path(__file__).resolve().parents[3]


class Below(Settings):
    told: int = Field(1, description="what it does")
    silent: int = 1


class Whole(Settings):
    """All of it."""

    below: Below = Below()


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "headrace config --reference > docs/configuration.md"


def test_every_key_says_what_it_does() -> None:
    assert undescribed() == []


def test_a_key_that_says_nothing_is_noticed() -> None:
    assert undescribed(Whole) == ["Below", "Whole.below", "Below.silent"]


def test_keys_on_the_page_can_be_set() -> None:
    """Each key's own default, where it has one, by `--set`."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| [^|]+ \| `([^`]+)` \|", reference(), re.MULTILINE)
    assert len(rows) > 60
    for key, default in rows:
        assert load_config(None, [f"{key}={default}"]) == load_config(), key


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, None),
        ("redis://host:6379", "redis://host:6379"),
        ("rediss://user:pass@word@host:6379/0", "rediss://***@host:6379/0"),
    ],
)
def test_urls_are_shown_without_their_password(url: str | None, shown: str | None) -> None:
    assert without_password(url) == shown


def test_a_file_is_checked_and_shown_as_it_would_be_used(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("store: {redis_url: 'redis://:hunter2@host:1'}\npools: {decode: {replicas: 3}}\n")
    done = CliRunner().invoke(app, ["config", "-f", str(file), "--set", "pools.prefill.replicas=2"])
    assert done.exit_code == 0
    assert "hunter2" not in done.output
    expected = load_config(file, ["pools.prefill.replicas=2", "store.redis_url=redis://***@host:1"])
    assert parse_config(done.stdout) == expected
