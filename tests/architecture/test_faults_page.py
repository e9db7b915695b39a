"""docs/faults.md: no case is missing, every test that it names exists, every counter that it names is counted."""

import ast
import re

from tests.architecture.source import ROOT, product, suite

NUMBERS = {
    "C": (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 20, 21, 22, 23, 25, 27, 28, 29, 30, 31, 32, 33, 35, 37),
    "R": (1, 2, 4, 5, 6, 7, 9, 11, 13, 14, 15),
    "F": (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14),
    "P": (1, 3, 4, 5, 7, 8, 9),
    "O": (1, 2, 3, 4, 6, 7, 8, 10),
    "S": (1, 2, 3, 4, 5, 7, 8),
}  # the numbers between were given to no case
CASES = [f"{kind}{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


def test_every_case_has_one_row_with_its_tests() -> None:
    rows = {row[0]: row for row in ROWS if re.fullmatch(r"[CRFPOS]\d\d", row[0])}
    assert sorted(rows) == sorted(CASES)
    assert [row[0] for row in ROWS if row[0] in rows] == CASES, "once each, in order"
    for case, (_, elsewhere, here, held_by) in rows.items():
        assert elsewhere, case
        assert here, case
        assert NAMED.findall(held_by), f"{case} names no test"


def test_every_test_named_there_exists() -> None:
    tests = {
        (source.path, node.name)
        for source in suite()
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = NAMED.findall(PAGE)
    assert len(named) > 100
    assert PAGE.count("::") == len(named), "a name that this test does not understand"
    assert not [f"{path}::{name}" for path, name in named if (path, name) not in tests]


def test_every_counter_named_there_is_counted() -> None:
    counters = [name for row in ROWS if "counter" not in row for name in re.findall(r"^`([a-z_]+)`$", row[1])]
    assert len(counters) > 10
    text = "\n".join(source.text for source in product() if not source.path.startswith(("simulation/", "chaos/")))
    assert not [name for name in counters if f'"{name}"' not in text]
