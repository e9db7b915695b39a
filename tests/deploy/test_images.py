"""The Dockerfiles: hadolint finds nothing, and we look at what it does not. Nothing here can build them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.chart import CHART, ROOT

IMAGES = ROOT / "deploy/images"
DOCKERFILES = sorted(IMAGES.glob("Dockerfile.*"))
HADOLINT = Path(sys.executable).with_name("hadolint")


def _instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) of every instruction, continued lines joined, comments left out."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_hadolint_finds_nothing(file: Path) -> None:
    done = subprocess.run([HADOLINT, "--failure-threshold", "info", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python:latest\nRUN cd /x && apt-get install python3\n")
    done = subprocess.run([HADOLINT, wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_image_is_built_in_stages_pinned_and_not_root(file: Path) -> None:
    instructions = _instructions(file)
    bases = [rest.split()[0] for word, rest in instructions if word == "FROM"]
    assert len(bases) == 2
    assert all(re.search(r":[0-9]+\.[0-9]", base) for base in bases)
    last = instructions[[index for index, (word, _) in enumerate(instructions) if word == "FROM"][-1] :]
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert all("pip install" not in rest for word, rest in last if word == "RUN")  # no build tools are left
    installs = [rest for word, rest in instructions if word == "RUN" and "pip install" in rest and "-r " in rest]
    assert all("-c requirements.lock" in rest for rest in installs)
    assert installs


def _installed(file: Path, stage: int) -> set[str]:
    """The distribution's packages that a stage installs; 0 builds, 1 is the image."""
    instructions = _instructions(file)
    starts = [index for index, (word, _) in enumerate(instructions) if word == "FROM"]
    of_stage = instructions[starts[stage] : [*starts, len(instructions)][stage + 1]]
    lists = [rest.partition("apt-get install")[2].partition("&&")[0] for word, rest in of_stage if word == "RUN"]
    return {word for each in lists for word in each.split() if not word.startswith("-")}


def test_what_is_compiled_finds_its_compiler_and_its_libraries() -> None:
    """engine/native is optional: without a compiler it is not there, and nothing says so. Triton compiles when it runs,
    against Python's headers.
    """
    cpu, cuda = DOCKERFILES
    assert "g++" in _installed(cpu, 0)
    assert "_forward*.so" in cpu.read_text(), "the build fails without it"
    assert "libgomp1" in _installed(cpu, 1)
    assert "g++" not in _installed(cpu, 1)
    assert _installed(cuda, 1) >= {"gcc", "libc6-dev", "python3-dev"}
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().splitlines(), "not those of the machine that builds"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_every_package_is_copied_and_not_ignored(file: Path) -> None:
    copied = {rest.split()[-1] for word, rest in _instructions(file) if word == "COPY" and "--from" not in rest}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.rstrip("*") for name in found if (ROOT / name.rstrip("*") / "__init__.py").exists()}
    assert packages <= copied
    assert packages <= {line.removeprefix("!") for line in ignored if line.startswith("!")}


def test_what_an_image_installs_is_what_pyproject_names() -> None:
    """With what `config.tracing` of the chart needs: nothing can be added to an image that runs."""
    script = [sys.executable, str(IMAGES / "dependencies.py"), str(ROOT / "pyproject.toml")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed == project["dependencies"] + project["optional-dependencies"]["tracing"]
    assert any(wanted.startswith("opentelemetry-exporter-otlp") for wanted in printed)


def test_what_an_image_installs_is_pinned() -> None:
    script = [sys.executable, str(IMAGES / "dependencies.py"), str(ROOT / "pyproject.toml")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    lock = (ROOT / "requirements.lock").read_text().lower().replace("_", "-").splitlines()
    wanted = {re.split(r"[^\w.-]", line)[0].lower() for line in printed if "sys_platform" not in line}
    assert wanted <= {line.partition("==")[0] for line in lock}


def test_the_chart_runs_as_the_user_the_images_have() -> None:
    values = (CHART / "values.yaml").read_text()
    assert "runAsUser: 10001" in values
    assert "runAsGroup: 10001" in values
