"""Every command and name in the README and the guides: ours are parsed, Helm's rendered, objects, settings exist.

What is run besides: tests/integration/test_documents.py. Pages whose commands are looked at nowhere are in ELSEWHERE.
"""

import itertools
import re
import shlex
from typing import Any

import pytest
import typer.main
import yaml

from cluster.cli.main import app
from cluster.config import parse_config
from cluster.core.config import ClusterConfig
from cluster.core.faults import POINTS
from cluster.reference import reference
from tests.architecture.source import PACKAGES
from tests.deploy.chart import CHART, ROOT, objects_in, render, values_of
from tests.deploy.documents import NOT_RUN, PAGES, Command, blocks, commands, script, to_run, told
from tests.metrics_page import listed_metrics

KUBERNETES, SCALING, FAILURES = (ROOT / "docs" / f"{name}.md" for name in ("kubernetes", "scaling", "failures"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
LANGUAGES = {"sh", "yaml", "python", "json", "protobuf", "promql", "text"}
ELSEWHERE = {
    "clients.md": "other projects' clients, in environments of their own; test_bench_clients.py sends what they send",
}
"""Pages whose shell commands are not Headrace's, and why they are not looked at here."""

HELM_FLAGS = {"--create-namespace", "--reset-then-reuse-values"}
SECRET_KEYS = {"cluster-secret", "auth_token", "tenants.yaml", "password", "url", "tls.crt", "tls.key", "ca.crt"}
NODE_TYPES = {"head", "worker"}  # KubeRay's own label

EVERY = [command for page in PAGES if page.name not in ELSEWHERE for command in commands(page)]


def of(program: str) -> list[Command]:
    return [command for command in EVERY if command.program == program]


def parse(words: list[str]) -> dict[str, Any]:
    """As the command line would, down to the last subcommand. Raises click's UsageError."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("headrace", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return dict(context.params)


def test_every_program_is_looked_at_in_some_way() -> None:
    """A new one needs a check here, or a page in ELSEWHERE with its reason."""
    run = {"headrace", "curl", "tail", "export"}  # tests/integration/test_documents.py
    assert {command.program for command in EVERY} <= run | {"helm", "kubectl", "make", "docker", "openssl"}
    assert set(ELSEWHERE) <= {page.name for page in PAGES}


def test_every_command_of_ours_is_in_the_script_of_its_page() -> None:
    """tests/integration/test_documents.py runs it: all of them but those that NOT_RUN names, each of which is there."""
    for page in PAGES:
        assert told(script(page)) == len(to_run(page)), page.name
    ours = of("headrace")
    assert sum(len(to_run(page)) for page in PAGES) == sum(NOT_RUN.keys().isdisjoint(each.words) for each in ours)
    assert {word for each in ours for word in each.words} >= NOT_RUN.keys()


def test_every_block_says_what_it_is() -> None:
    wrong = [f"{b.page.name}:{b.line} {b.language!r}" for page in PAGES for b in blocks(page)]
    assert not [block for block in wrong if block.partition(" ")[2].strip("'") not in LANGUAGES]


@pytest.mark.parametrize("command", of("headrace"), ids=str)
def test_headrace_command_exists(command: Command) -> None:
    assert isinstance(parse(command.words[1:]), dict)


def test_inline_commands_exist() -> None:
    """`headrace ...` within text: the command and its options, whatever stands for their values."""
    group: Any = typer.main.get_command(app)
    wrong, seen = [], 0
    for page in PAGES:
        for text in re.findall(r"`headrace ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            name, *rest = re.split(r"[\s|\\\[\]]+", text)
            command = group.commands.get(name)
            while rest and hasattr(command, "commands"):
                command = command.commands.get(rest.pop(0))
            known = {option for parameter in command.params for option in parameter.opts} if command else set()
            seen += 1
            wrong += [f"{page.name}: {text}" for word in rest if word.startswith("-") and word not in known | {"--"}]
            wrong += [] if command else [f"{page.name}: {text}"]
    assert not wrong
    assert seen > 40


@pytest.mark.parametrize("command", of("helm"), ids=str)
def test_helm_command_renders(command: Command) -> None:
    _, verb, release, *rest = [word for word in command.words if word not in HELM_FLAGS]
    keeps = "--reset-then-reuse-values" in command.words
    assert keeps is (verb == "upgrade"), "else what was said at the installation is forgotten"
    if verb == "rollback":
        assert (release, rest) == ("headrace", ["--namespace", "llm"])
        return
    chart, *options = rest
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


@pytest.fixture(scope="module")
def installed() -> list[dict[str, Any]]:
    """What `helm install headrace` makes of the first values file: names that the guides use."""
    return objects_in(render(values_of("minimal")))


@pytest.mark.parametrize("command", of("kubectl"), ids=str)
def test_kubectl_command_names_what_exists(command: Command, installed: list[dict[str, Any]]) -> None:
    """Namespace, objects, labels, container and keys are those of a release `headrace` in `llm`."""
    (cluster,) = [each for each in installed if each["kind"] == "RayCluster"]
    groups = [*cluster["spec"]["workerGroupSpecs"], cluster["spec"]["headGroupSpec"]]
    containers = {one["name"] for group in groups for one in group["template"]["spec"]["containers"]}
    names = {(each["kind"].lower(), each["metadata"]["name"]) for each in installed}
    labels = {
        "ray.io/cluster": {cluster["metadata"]["name"]},
        "ray.io/node-type": NODE_TYPES,
        "ray.io/group": {group.get("groupName", "headgroup") for group in groups},
    }
    words = shlex.split(command.text.partition(" -- ")[0], comments=True)
    assert words[1:3] == ["-n", "llm"]
    for option, value in itertools.pairwise(words):
        if option == "-l":
            assert all(part.partition("=")[2] in labels[part.partition("=")[0]] for part in value.split(","))
        elif option == "-c":
            assert value in containers
    for word in words[3:]:
        if "/" in word and not word.startswith(("-", "$")) and "=" not in word:
            assert tuple(word.split("/")) in names
        elif word.startswith("--from-"):
            assert word.partition("=")[2].partition("=")[0] in SECRET_KEYS


@pytest.mark.parametrize("command", [*of("make"), *of("docker")], ids=str)
def test_what_is_built_is_there(command: Command) -> None:
    """No engine builds images here (tests/deploy/test_images.py lints them); `make` runs what runs this."""
    words = command.words
    if command.program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[1] == "build"
        assert (ROOT / words[words.index("-f") + 1]).exists()
        assert words[-1] == "."


def test_settings_that_pages_name_exist() -> None:
    """`group.key` in text, in any page: of the configuration, or of the chart's values where they differ."""
    keys = set(re.findall(r"^\| `([a-z_.]+)` \|", reference(), re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    groups = "|".join(ClusterConfig.model_fields)
    wrong, seen = [], 0
    for page in PAGES:
        for name in re.findall(rf"`((?:{groups})\.[a-zA-Z_.*]+)`", page.read_text(encoding="utf-8")):
            seen += 1
            whole = name.removesuffix(".*")
            known = any(re.match(whole.replace("*", "[a-z]+") + r"(\.|$)", key) for key in keys) or name in POINTS
            if not known and not name.endswith((".crt", ".key", ".yaml")) and not _value(values, name):
                wrong.append(f"{page.name}: {name}")
    assert not wrong
    assert seen > 60


def _value(values: Any, name: str) -> bool:
    for part in name.replace("pools.*", "pools.decode").removesuffix(".*").split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _slug(heading: str) -> str:
    """As GitHub makes an anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_between_pages_lead_somewhere() -> None:
    """Files, and headings within them; in decisions too."""
    wrong, seen = [], 0
    for page in [*PAGES, *DECISIONS]:
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in target:
                continue
            seen += 1
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            headings = (
                re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.suffix == ".md" else []
            )
            if not file.exists() or (anchor and anchor not in map(_slug, headings)):
                wrong.append(f"{page.name}: {target}")
    assert not wrong
    assert seen > 60


def test_files_that_pages_name_exist() -> None:
    """Of ours, with a folder: tests above all, which hold what the page says."""
    folders = "|".join((*PACKAGES, "tests", "docs", "deploy", "proto", "examples"))
    wrong, seen = [], 0
    for page in [*PAGES, *DECISIONS]:
        for name in re.findall(rf"`((?:{folders})/[\w./-]+\.(?:py|yaml|md|proto))", page.read_text(encoding="utf-8")):
            seen += 1
            if not (ROOT / name).exists():
                wrong.append(f"{page.name}: {name}")
    assert not wrong
    assert seen > 100


def test_configurations_in_pages_can_be_used() -> None:
    """YAML blocks, shortened keys made whole."""
    found = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    for block in found:
        text = re.sub(r"\[([0-9a-f]{4})\.\.\.([0-9a-f]{2})\]", lambda cut: f"[{cut[1]}{'0' * 58}{cut[2]}]", block.text)
        assert parse_config(text, f"{block.page.name}:{block.line}")
    assert len(found) >= 3


def test_reasons_and_counters_of_the_failure_guide_are_the_product_s() -> None:
    """What it quotes is said somewhere in the product; `...` stands for names."""
    text = FAILURES.read_text(encoding="utf-8")
    product = "\n".join(p.read_text() for p in ROOT.glob("*/**/*.py") if p.parts[-3] != "tests").replace('"\n', "")
    section = text.partition("## A 503")[2].partition("## A program")[0]
    reasons = [part.strip() for name in re.findall(r"`([^`|]+ [^`|]+)`", section) for part in name.split("...")]
    counters = re.findall(r"`([a-z]+_[a-z_]+)`", text.partition("## The path of KV")[2].partition("## It does not")[0])
    assert len(reasons) > 5
    assert len(counters) > 6
    assert not [reason for reason in [*reasons, *counters] if reason not in product]


def test_every_values_file_is_in_the_guide() -> None:
    named = set(re.findall(r"^\| `([a-z-]+\.yaml)` \|", KUBERNETES.read_text(), re.MULTILINE))
    assert named == {path.name for path in (ROOT / "deploy/helm/values").iterdir()}


def test_metrics_of_the_scaling_guide_exist() -> None:
    """By the list of all metrics, which tests/unit/router_front/test_metrics_page.py keeps right."""
    known = {name for name, *_ in listed_metrics()}
    named = {re.sub("_(bucket|total)$", "", name) for name in re.findall(r"\bheadrace_[a-z0-9_]+", SCALING.read_text())}
    assert len(named) > 5
    assert named <= known
    code = "".join(path.read_text() for path in (ROOT / "router").glob("*.py"))
    for reason in re.findall(r'reason="([a-z_]+)"', SCALING.read_text()):
        assert f'counters["attempts_{reason}"]' in code
