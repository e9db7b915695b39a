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

BROWSERLESS = """
import pytest
from tests.integration.browser import browser, chromium

@pytest.fixture
def stack():
    chromium()

def test_over_a_stack(stack):
    pass

async def test_alone():
    async with browser():
        pass
"""


def run(folder: Path, *options: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.verify_record", "-p", "no:cacheprovider", *options]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run([*command, "."], cwd=folder, env=environment, capture_output=True, text=True, check=False)


PARTS = pytest.mark.parametrize("parts", [(), ("-n", "2")], ids=["whole", "in parts"])


@PARTS
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


@PARTS
def test_a_machine_without_a_browser_fails_a_recorded_run_and_is_told_what_to_install(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    options = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-rs", *parts)
    plain = run(tmp_path, *options, tests=BROWSERLESS)
    assert plain.returncode == 0, plain.stdout
    assert "2 skipped" in plain.stdout
    recorded = run(tmp_path, *options, f"--record={tmp_path / 'kept'}", tests=BROWSERLESS)
    assert recorded.returncode == 1, recorded.stdout
    assert "1 failed, 1 error" in recorded.stdout
    assert recorded.stdout.count("apt install chromium") >= 2
    at_once, _, at_the_end = recorded.stdout.partition(" FAILURES ")
    assert "test_it.py::test_alone, call:" in at_once
    assert "apt install chromium" in at_once
    assert "test_it.py::test_alone, call:" not in at_the_end
    (kept,) = (tmp_path / "kept").iterdir()
    assert "0 passed, 1 failed, 1 error, 0 skipped." in kept.read_text(encoding="utf-8")
