"""The record of `make verify`, of real runs of pytest: one file a run, what was skipped and why, nothing missing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_well(report):
    report("a figure: 7")

def test_not_here():
    pytest.skip("this machine has no GPU")
"""


def run(folder: Path, *options: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.verify_record", "-p", "no:cacheprovider", *options]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run([*command, "."], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("parts", [(), ("-n", "2")], ids=["whole", "in parts"])
def test_each_run_has_a_record_of_its_own_that_says_why_something_was_skipped(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    done = [run(tmp_path, f"--record={tmp_path / 'kept'}", *parts) for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0], done[0].stdout
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) == 2
    for file in kept:
        text = file.read_text(encoding="utf-8")
        assert "1 passed, 0 failed, 0 error, 1 skipped." in text
        assert "- test_it.py::test_not_here: this machine has no GPU\n" in text
        assert "- a figure: 7\n" in text
        assert any(f"recorded in {file}" in each.stdout for each in done)
