"""What a run reports beyond pass and fail, and the record that `make verify` keeps of it (`--record DIR`)."""

import contextlib
import os
import platform
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Protocol

import pytest
from _pytest.outcomes import Skipped
from _pytest.terminal import TerminalReporter
from xdist import is_xdist_worker

Report = Callable[[str], None]


class Missing(Skipped):
    """Raised by a test that needs a program which this machine lacks: skipped, but failed in a run that is recorded,
    which claims to have verified everything. Says what to install.
    """


class Part(Protocol):
    """What xdist calls a node: the process of a part, as the whole sees it."""

    config: pytest.Config


_LINES = pytest.StashKey[list[str]]()
_SLOW_S = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="DIR", help="write a summary of this run to DIR/<date>-<time>.md")


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """Notes a line for the end of the run: figures and exceptions are printed, not hidden, also when all is well."""
    return request.config.stash.setdefault(_LINES, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A part of a run hands its lines to the whole (tests/conftest.py)."""
    if is_xdist_worker(session):
        session.config.workeroutput["reported"] = session.config.stash.get(_LINES, [])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Part, error: object) -> None:
    """A part has ended: its lines are the run's; one that died has none, and xdist fails the tests it ran."""
    lines = getattr(node, "workeroutput", {}).get("reported", [])
    node.config.stash.setdefault(_LINES, []).extend(lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What `Missing` means."""
    result = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, Missing) and item.config.getoption("--record"):
        result.outcome, result.longrepr = "failed", str(call.excinfo.value)
    return result


class _AtOnce:
    """In a run of an hour a failure is shown when it happens, not an hour later."""

    def __init__(self, reporter: TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", red=True)


@pytest.hookimpl(trylast=True)  # the reporter is there by then
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--record") and reporter is not None:
        config.pluginmanager.register(_AtOnce(reporter))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Print what was noted, and keep it when asked to."""
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("reported")
    for line in lines:
        terminalreporter.write_line(line)
    folder = config.getoption("--record")
    if folder and not hasattr(config, "workerinput"):  # a part of a run has no record of its own
        file = _record(Path(str(folder)), _summary(terminalreporter, lines))
        terminalreporter.write_line(f"recorded in {file}")


def _record(folder: Path, text: str) -> Path:
    """Into a file of its own: no run's record replaces another's."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d-%H%M}"
    for name in chain([stem], (f"{stem}-{number}" for number in count(2))):
        with contextlib.suppress(FileExistsError), (folder / f"{name}.md").open("x", encoding="utf-8") as file:
            file.write(text)
            break
    return folder / f"{name}.md"


def _summary(terminalreporter: TerminalReporter, lines: list[str]) -> str:
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    took = [
        (each.duration, each.nodeid, outcome)
        for outcome in ("passed", "failed", "error")
        for each in terminalreporter.stats.get(outcome, [])
        if each.duration >= _SLOW_S or outcome != "passed"
    ]
    skipped = [(each.nodeid, _why(each.longrepr)) for each in terminalreporter.stats.get("skipped", [])]
    rows = [f"| {node} | {outcome} | {seconds:.0f} |" for seconds, node, outcome in sorted(took, reverse=True)]
    return "\n".join(
        [
            f"# `make verify`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "",
            ", ".join(f"{count} {name}" for name, count in counts.items()) + ".",
            "",
            f"Machine: {_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
            + ", ".join(f"{name} {version(name)}" for name in ("torch", "nixl", "ray", "grpcio", "transformers"))
            + ".",
            "",
            "| test | outcome | seconds |",
            "| --- | --- | --- |",
            *rows,
            "",
            *(["## Skipped", "", *(f"- {node}: {why}" for node, why in skipped), ""] if skipped else []),
            *(["## Reported", "", *(f"- {line}" for line in lines), ""] if lines else []),
        ]
    )


def _why(longrepr: object) -> str:
    """A skip is told as (file, line, reason)."""
    reason = longrepr[2] if isinstance(longrepr, tuple | list) else longrepr
    return str(reason).removeprefix("Skipped: ")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
