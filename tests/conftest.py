"""For every test: no process that a test started may outlive the session."""

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings
from xdist import is_xdist_worker
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import tests.stateful  # noqa: F401 - registers the profile

# Before anything imports Triton: its kernels then run in its interpreter, on any machine (transformers imports it too).
os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.verify_record"]
settings.load_profile("headrace")

MARK = "HEADRACE_TEST_SESSION"
"""Set in our environment, so that every process started from here carries it, however it detaches itself."""

_session_id = uuid.uuid4().hex
_started = psutil.Process().create_time()
_PATIENCE_S = 5.0
_CLUSTERS = "clusters"
_STARTING = ("integration", "contract")
_BEGUN = pytest.StashKey[bool]()
_POLITE = 10  # niceness of the half that waits for nothing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Simulations last: in one process their seeds are played in the background meanwhile (tests/sim/conftest.py)."""
    items.sort(key=lambda item: "tests/sim/" in item.path.as_posix())


class Halves(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """What starts programs is one half, one after the other; the files of the rest are dealt to whoever is free.

    Not xdist's groups: those are a suffix of the node's name, which pytest 9.2 does not read any more.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _CLUSTERS if file.split("/")[1] in _STARTING else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Halves:
    """For `-n 2`, whatever --dist says."""
    return Halves(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_xdist_worker(session):
        os.environ[MARK] = _session_id


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The half that does not begin with the clusters waits for nothing: it lets the other go first."""
    begun, item.config.stash[_BEGUN] = item.config.stash.get(_BEGUN, False), True
    if is_xdist_worker(item.session) and not begun and not _starts_programs(item):
        os.nice(_POLITE)


def _starts_programs(item: pytest.Item) -> bool:
    return item.path.relative_to(item.config.rootpath).parts[1] in _STARTING


@pytest.hookimpl(trylast=True)  # the parts have ended by then
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the session when processes are left, name them and end them."""
    if is_xdist_worker(session):
        return
    _, left = psutil.wait_procs(list(_ours()), timeout=_PATIENCE_S)
    if not left:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for process in left:
        if reporter is not None:
            reporter.write_line(f"LEFT BEHIND by the tests: {_describe(process)}", red=True)
    for process in left:
        process.kill()
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _ours() -> Iterator[psutil.Process]:
    """Processes that carry our mark, and Ray's orphans, which overwrite their environment with their title."""
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            marked = process.environ().get(MARK) == _session_id
            orphan = command.startswith("ray::") and process.ppid() == 1 and process.create_time() > _started
        except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
            continue
        if (marked or orphan) and process.pid != os.getpid() and "resource_tracker" not in command:
            yield process


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
