"""Run mutants: each changes one line in a copy of the packages, and its test must fail there.

    1. copy      the packages and the tests into a folder of their own
    2. green     every named test passes on the unchanged copy, else a red one would prove nothing
    3. red       one mutant at a time: change the line, run its one test, put the line back
A mutant is killed by a test that ran and failed. A test that cannot be collected, that hangs or that stumbles over a
misspelt mutant proves nothing and counts as no kill.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from cluster.core.clock import SystemClock
from tests.architecture.source import PACKAGES, ROOT
from tests.mutants.mutant import Mutant

LIMIT_S = 120.0
TESTS_FAILED = 1  # pytest's exit code; 2 and above: interrupted, wrong usage, nothing collected
OPTIONS = ("-x", "-rf", "--tb=no", "--no-header", "--color=no", "-p", "no:cacheprovider", "--hypothesis-seed=0")
NOT_A_FAULT = ("NameError", "SyntaxError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one mutant: "red", "SURVIVED", "HANGS" or "BROKEN", and the test's own words."""

    mutant: Mutant
    verdict: str
    seconds: float
    why: str

    def line(self) -> str:
        """One row of the table."""
        test = self.mutant.test.rpartition("/")[2]
        row = f"{self.verdict:8} {self.seconds:5.1f} s  {self.mutant.name:72}  {test}"
        return row if self.verdict == "red" else f"{row}\n{' ' * 18}{self.why}"


class Copy:
    """The packages and the tests in `folder`, where lines may be changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in (*PACKAGES, "tests"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def pytest(self, tests: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Exit code and output of pytest over some nodes. Raises subprocess.TimeoutExpired."""
        environment = os.environ | {"PYTHONPATH": str(self._folder), "COLUMNS": "400"}  # reasons in full
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *tests],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        return done.returncode, done.stdout + done.stderr

    def try_out(self, mutant: Mutant, limit_s: float = LIMIT_S) -> Outcome:
        """Change the line, run the test, put the line back. Raises Stale."""
        file, clock = self._folder / mutant.file, SystemClock()
        text = file.read_text(encoding="utf-8")
        changed = mutant.applied(text)
        _write(file, changed)
        started = clock.now()
        try:
            verdict, why = judge(*self.pytest([mutant.test], limit_s))
        except subprocess.TimeoutExpired:
            verdict, why = "HANGS", f"no end within {limit_s:g} s"
        finally:
            _write(file, text)
        return Outcome(mutant, verdict, clock.now() - started, why)


def _write(file: Path, text: str) -> None:
    """Also forget what was compiled of it: a changed line may leave size and second of the file as they were."""
    file.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


def judge(code: int, output: str) -> tuple[str, str]:
    """Verdict and reason of a test run on a mutant."""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    why = failed[0].partition(" - ")[2] or failed[0] if failed else output.strip()[-300:]
    if code == 0:
        return "SURVIVED", "the test does not see it"
    if code != TESTS_FAILED or why.startswith(NOT_A_FAULT):
        return "BROKEN", why
    return "red", why


def run_all(mutants: Sequence[Mutant], folder: Path, report: Report) -> list[Outcome]:
    """Try out every mutant in a copy in `folder`. Raises RuntimeError when a named test is red without one."""
    copy = Copy(folder)
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    code, output = copy.pytest(tests, LIMIT_S * len(tests))
    if code != 0:
        raise RuntimeError(f"the tests are not green without a mutant:\n{output[-4000:]}")
    report(f"{len(tests)} tests are green without a mutant; {len(mutants)} mutants follow")
    outcomes = []
    for mutant in mutants:
        outcomes.append(copy.try_out(mutant))
        report(outcomes[-1].line())
    left = [outcome.mutant.name for outcome in outcomes if outcome.verdict != "red"]
    report(f"{len(outcomes) - len(left)} of {len(outcomes)} red" + (f"; not: {', '.join(left)}" if left else ""))
    return outcomes
