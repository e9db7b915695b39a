"""Commands and names in docs/kubernetes.md and docs/scaling.md: ours are parsed, Helm's rendered, metrics exist."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from cluster.cli.main import app
from tests.deploy.chart import ROOT, objects_in, render
from tests.metrics_page import listed_metrics

GUIDES = [ROOT / "docs/kubernetes.md", ROOT / "docs/scaling.md"]
COMMON = {"--create-namespace"}


def _commands(program: str) -> Iterator[list[str]]:
    """Every command of `program` in the guides' code blocks, also behind `kubectl exec ... --`."""
    for guide in GUIDES:
        for block in re.findall(r"^```\n(.*?)^```$", guide.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                command = line.strip().partition(" -- ")[2] or line.strip()
                if command.startswith(program + " "):
                    yield shlex.split(command, comments=True)


@pytest.mark.parametrize("command", list(_commands("headrace")), ids=" ".join)
def test_headrace_command_exists(command: list[str]) -> None:
    group = typer.main.get_command(app)
    with group.make_context("headrace", command[1:]) as context:
        name, sub, rest = group.resolve_command(context, command[1:])  # type: ignore[attr-defined]
        with sub.make_context(name, rest, parent=context) as parsed:
            assert parsed.params


@pytest.mark.parametrize("command", list(_commands("helm")), ids=" ".join)
def test_helm_command_renders(command: list[str]) -> None:
    _, verb, release, chart, *options = [word for word in command if word not in COMMON]
    assert verb in ("install", "upgrade")
    assert (ROOT / chart / "Chart.yaml").exists()
    values: dict[str, Any] = {}
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option == "-f":
            values |= yaml.safe_load((ROOT / value).read_text())
        elif option == "--set":
            key, _, given = value.partition("=")
            *above, last = key.split(".")
            below = values
            for part in above:
                below = below.setdefault(part, {})
            below[last] = yaml.safe_load(given)
        else:
            assert option == "--namespace"
    assert objects_in(render(values, name=release))


def test_there_are_commands_to_look_at() -> None:
    assert len(list(_commands("headrace"))) >= 5
    assert len(list(_commands("helm"))) >= 4


def test_every_values_file_is_in_the_guide() -> None:
    named = set(re.findall(r"^\| `([a-z-]+\.yaml)` \|", GUIDES[0].read_text(), re.MULTILINE))
    assert named == {path.name for path in (ROOT / "deploy/helm/values").iterdir()}


def test_metrics_of_the_scaling_guide_exist() -> None:
    """By the list of all metrics, which tests/unit/router_front/test_metrics_page.py keeps right."""
    known = {name for name, *_ in listed_metrics()}
    named = {
        re.sub("_(bucket|total)$", "", name) for name in re.findall(r"\bheadrace_[a-z0-9_]+", GUIDES[1].read_text())
    }
    assert len(named) > 5
    assert named <= known
    code = "".join(path.read_text() for path in (ROOT / "router").glob("*.py"))
    for reason in re.findall(r'reason="([a-z_]+)"', GUIDES[1].read_text()):
        assert f'counters["attempts_{reason}"]' in code
