"""The table of mutants fits the product as it is, the runner can tell red from green, and every mutant is killed."""

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant, Stale
from tests.mutants.run import Copy, judge, run_all

LEAST = 25


@lru_cache
def names_of_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_line_is_there_once_and_its_test_exists(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed.count("\n") == text.count("\n"), "one line"
    assert changed != text
    ast.parse(changed)
    file, _, name = mutant.test.partition("[")[0].partition("::")
    assert name in names_of_tests(file)


def test_there_are_enough_and_each_has_its_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= LEAST
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("text", ["", "one = 1\n", "two = 2\n    two = 2\n"])
def test_a_line_that_is_gone_or_there_twice_is_noticed(text: str) -> None:
    with pytest.raises(Stale, match="two = 2"):
        Mutant("m", "f", "two = 2", "two = 3", "t").applied(text)


def test_only_the_line_changes_and_keeps_its_indentation() -> None:
    mutant = Mutant("m", "f", "two = 2", "two = 3", "t")
    assert mutant.applied("def f():\n    two = 2\n    # two = 2\n") == "def f():\n    two = 3\n    # two = 2\n"


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "1 passed", "SURVIVED"),
        (1, "FAILED tests/a.py::t - assert 5 == 6", "red"),
        (1, "FAILED tests/a.py::t - NameError: name 'slat' is not defined", "BROKEN"),
        (2, "ERROR tests/a.py - SyntaxError: invalid syntax", "BROKEN"),
        (4, "ERROR: not found: tests/a.py::t", "BROKEN"),
        (5, "no tests ran", "BROKEN"),
    ],
)
def test_only_a_test_that_ran_and_failed_kills(code: int, output: str, verdict: str) -> None:
    got, why = judge(code, output)
    assert got == verdict
    assert why


def test_the_runner_on_one_mutant_as_it_is_without_effect_and_without_end(tmp_path: Path) -> None:
    kill = next(mutant for mutant in MUTANTS if mutant.name == "skip the salt in every key")
    copy, text = Copy(tmp_path), (ROOT / kill.file).read_text(encoding="utf-8")
    killed = copy.try_out(kill)
    assert (killed.verdict, killed.why) == ("red", "assert 5 == 6")
    assert copy.try_out(replace(kill, after=f"{kill.before}  # as before")).verdict == "SURVIVED"
    assert copy.try_out(replace(kill, after="while (part := salt) is not None:"), limit_s=2.0).verdict == "HANGS"
    assert (tmp_path / kill.file).read_text(encoding="utf-8") == text


@pytest.mark.verify
def test_every_mutant_turns_its_test_red(tmp_path: Path, report: Callable[[str], None]) -> None:
    outcomes = run_all(MUTANTS, tmp_path, report)
    assert not [outcome.line() for outcome in outcomes if outcome.verdict != "red"]
