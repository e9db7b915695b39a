"""For every test: no process that a test started may outlive the session."""

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings
from xdist import is_xdist_worker
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

import tests.stateful  # noqa: F401 - registers the profile

# Before anything imports Triton: its kernels then run in its interpreter, on any machine (transformers imports it too).
os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.verify_record"]
settings.load_profile("headrace")

BATCHES = "test_simulation.py::test_many_more_seeds["
MARK = "HEADRACE_TEST_SESSION"
"""Set in our environment, so that every process started from here carries it, however it detaches itself."""

_session_id = uuid.uuid4().hex
_started = psutil.Process().create_time()
_PATIENCE_S = 5.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """First what starts programs: it waits more than it computes. Files stay whole: what one sets up is set up once.

    Simulations are long: in two parts (`-n 2`) they come next, so that no part is left with them alone; in one, last,
    since their seeds are played in the background meanwhile (tests/sim/conftest.py).
    """

    def order(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        if folder in ("integration", "contract"):
            return 0
        return 2 if folder != "sim" else 1 if is_xdist_worker(session) else 3

    items.sort(key=order)


class _FilesButBatches(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """A file goes to one part as a whole, but batches of seeds share nothing: an hour of them keeps both parts busy."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if BATCHES in nodeid else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _FilesButBatches | None:
    return _FilesButBatches(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_xdist_worker(session):
        os.environ[MARK] = _session_id


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
