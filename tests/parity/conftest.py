"""What parity tests report is shown at the end, also when all is well: exceptions are printed, not hidden."""

from collections.abc import Callable

import pytest
from _pytest.terminal import TerminalReporter

Report = Callable[[str], None]
_LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """Notes a line for the end of the run."""
    return request.config.stash.setdefault(_LINES, []).append


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Print what was noted."""
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("parity")
    for line in lines:
        terminalreporter.write_line(line)
