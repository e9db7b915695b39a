"""What is dialled of somebody who listens on every interface (FAULTS O04)."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import parse_config
from cluster.core.addresses import reached_at
from cluster.core.errors import HeadraceError
from cluster.run_dir import RunDir


@pytest.mark.parametrize(
    ("address", "own", "told"),
    [
        ("0.0.0.0:8001", "10.0.0.7", "10.0.0.7:8001"),
        ("http://0.0.0.0:8000", "10.0.0.7", "http://10.0.0.7:8000"),
        ("https://[::]:8000", "fd00::7", "https://[fd00::7]:8000"),
        ("[::]:8001", "[fd00::7]", "[fd00::7]:8001"),
        ("10.0.0.0:8001", "10.0.0.7", "10.0.0.0:8001"),
        ("http://127.0.0.1:8000", "10.0.0.7", "http://127.0.0.1:8000"),
    ],
)
def test_every_interface_is_no_address_to_dial(address: str, own: str, told: str) -> None:
    assert reached_at(address, own) == told


@pytest.mark.parametrize("words", [["explain", "one"], ["generate", "hello"]])
def test_a_router_that_listens_everywhere_is_looked_for_in_the_cluster(tmp_path: Path, words: list[str]) -> None:
    """On a machine that is not the router's, its configured address is this machine's own, where nobody listens."""
    run_dir = RunDir(tmp_path / "headrace")
    run_dir.prepare(parse_config("router: {host: 0.0.0.0}"), None)
    done = CliRunner().invoke(app, [*words, "--root", str(tmp_path)])
    assert isinstance(done.exception, HeadraceError)
    assert "is not running" in str(done.exception)
