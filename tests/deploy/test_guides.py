"""Commands and names in docs/kubernetes.md and docs/scaling.md: ours are parsed, Helm's rendered, metrics exist."""

import random
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml
from prometheus_client import CollectorRegistry

from cluster.cli.main import app
from cluster.core.clock import ManualClock
from cluster.core.config import RouterSettings, TimingSettings
from router.dispatcher import DispatcherCore
from router.front.metrics import FrontMetrics, StatusCollector
from tests.deploy.chart import ROOT, objects_in, render

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
    registry = CollectorRegistry()
    FrontMetrics(registry, ManualClock()).requests.labels("chat", "overloaded").inc()
    core = DispatcherCore(RouterSettings(), TimingSettings(), 1, random.Random(0))
    registry.register(StatusCollector(lambda: core.status(0.0) | {"counters": {"attempts_preempted": 1}}))
    known = {sample.name for family in registry.collect() for sample in family.samples}
    known |= {family.name for family in registry.collect()}
    named = set(re.findall(r"\bheadrace_[a-z_]+", GUIDES[1].read_text()))
    assert len(named) > 5
    assert {name for name in named if name.removesuffix("_bucket") not in known} == set()
    code = "".join(path.read_text() for path in (ROOT / "router").glob("*.py"))
    for counter in re.findall(r'counters\{name="([a-z_]+)"', GUIDES[1].read_text()):
        assert f'counters["{counter}"]' in code
