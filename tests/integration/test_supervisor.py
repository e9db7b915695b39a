"""A supervisor and a real child process that speaks the protocol."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from cluster.config import dump_config, environment, load_config
from cluster.core.clock import ManualClock
from cluster.core.config import ClusterConfig
from cluster.local import LocalCluster
from cluster.pipe import Drain, Member, MembersLine, Role, Scale, Wish, encode, role_of
from cluster.secret import create_secret
from cluster.supervisor import MAX_WISHES, ProgramSpec, ProgramStatus, Supervisor, backoff_s
from tests.fake_program import PATIENCE_S, Hearing

PEER = Member(name="prefill-0", role="prefill", address="p:1", epoch=2**64 - 1)


def _fulfil(wish: Wish) -> str | None:
    if wish == Drain("prefill-0"):
        raise RuntimeError("nobody thought of this")
    return None if isinstance(wish, Drain) else f"no: {wish}"


class Watched:
    """A supervisor whose reports the test reads one by one."""

    def __init__(self, folder: Path, name: str) -> None:
        role: Role = role_of(name)
        program = (sys.executable, "-m", "tests.fake_program")
        command = (*program, "--config", str(folder / "config.yaml"), "--name", name, "--supervised")
        spec = ProgramSpec(name, role, command, environment({}), folder / f"{name}.log")
        self.reports: queue.Queue[ProgramStatus] = queue.Queue()
        self.supervisor = Supervisor(spec, self.reports.put, fulfil=_fulfil)
        self.hearing = Hearing(folder, name)
        self.log_file = spec.log_file
        self.supervisor.start()

    def until(self, condition: Callable[[ProgramStatus], bool]) -> ProgramStatus:
        while not condition(status := self.reports.get(timeout=PATIENCE_S)):
            pass
        return status

    def ready(self) -> ProgramStatus:
        return self.until(lambda status: status.state == "ready")

    def processes(self, status: ProgramStatus) -> list[psutil.Process]:
        assert status.ready is not None
        return [psutil.Process(pid) for pid in status.ready.pids]


Watch = Callable[[str], Watched]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    create_secret(tmp_path / "secret")
    config = load_config(None, [f"secret_file={tmp_path / 'secret'}"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    started: list[Watched] = []

    def start(name: str) -> Watched:
        started.append(Watched(tmp_path, name))
        return started[-1]

    yield start
    for each in started:
        each.supervisor.stop(1.0)
        with each.hearing:
            pass


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def test_ready_members_and_an_orderly_stop(watch: Watch) -> None:
    watched = watch("decode-0")
    status = watched.ready()
    assert status.ready is not None
    assert (status.ready.name, status.ready.role, status.pid) == ("decode-0", "decode", status.ready.pids[0])
    processes = watched.processes(status)
    assert len(processes) == 2
    watched.supervisor.set_members([PEER])
    watched.hearing.until(PEER)
    watched.supervisor.stop(PATIENCE_S)
    assert gone(processes)
    last = watched.until(lambda status: status.state == "stopped")
    assert (last.last_exit, last.restarts, last.ready) == (0, 0, None)
    assert "a stray print" in watched.log_file.read_text()


def test_the_same_list_is_passed_on_each_time_it_is_told(tmp_path: Path) -> None:
    """That is how a program knows that the controller lives."""
    hearing = Hearing(tmp_path, "decode-0")
    fifo = str(tmp_path / "decode-0")
    copy = f"import sys; out = open({fifo!r}, 'wb', 0)\nfor line in sys.stdin.buffer: out.write(line)"
    spec = ProgramSpec("decode-0", "decode", (sys.executable, "-c", copy), environment({}), tmp_path / "log")
    supervisor = Supervisor(spec, lambda _: None, ManualClock())
    supervisor.start()
    with hearing:
        for _ in range(2):
            supervisor.set_desired({"decode": 1})
            supervisor.set_members([PEER])
            hearing.until_line(encode(MembersLine((PEER,), desired={"decode": 1})).decode())
        supervisor.stop(PATIENCE_S)


def test_a_program_that_is_started_again_hears_how_old_its_list_is(tmp_path: Path) -> None:
    """The controller may be long dead: a list that is repeated to a new life was not told anew."""
    hearing, clock = Hearing(tmp_path, "decode-0"), ManualClock()
    fifo = str(tmp_path / "decode-0")
    first = f"import sys; out = open({fifo!r}, 'wb', 0); out.write(sys.stdin.buffer.readline())"
    spec = ProgramSpec("decode-0", "decode", (sys.executable, "-c", first), environment({}), tmp_path / "log")
    supervisor = Supervisor(spec, lambda _: None, clock)
    supervisor.set_members([PEER])
    supervisor.start()
    with hearing:
        hearing.until_line(encode(MembersLine((PEER,))).decode())
        clock.advance(3600)
        hearing.until_line(encode(MembersLine((PEER,), 3600.0)).decode())
        supervisor.stop(PATIENCE_S)


def test_a_killed_program_comes_back_as_a_new_peer_and_hears_the_members(watch: Watch) -> None:
    watched = watch("decode-0")
    watched.supervisor.set_members([PEER])
    first = watched.ready()
    processes = watched.processes(first)
    watched.hearing.until(PEER)
    processes[0].kill()
    died = watched.until(lambda status: status.state == "waiting")
    assert (died.ready, died.last_exit, died.restarts) == (None, -signal.SIGKILL, 1)
    assert gone(processes)  # the program's own child as well
    again = watched.ready()
    assert first.ready is not None
    assert again.ready is not None
    assert again.ready.epoch != first.ready.epoch
    watched.hearing.until(PEER)


def test_a_program_that_left_in_order_comes_back_at_once_and_did_not_die(watch: Watch) -> None:
    watched = watch("decode-0")
    first = watched.ready()
    assert first.pid is not None
    os.kill(first.pid, signal.SIGTERM)
    left = watched.until(lambda status: status.state == "waiting")
    assert (left.last_exit, left.restarts, left.early_deaths) == (0, 0, 0)
    again = watched.ready()
    assert first.ready is not None
    assert again.ready is not None
    assert again.ready.epoch != first.ready.epoch
    assert "decode-0" in watched.log_file.read_text()


def test_a_program_that_fails_at_once_is_tried_ever_more_slowly(watch: Watch) -> None:
    watched = watch("prefill-9")
    status = watched.until(lambda status: status.early_deaths == 2)
    assert (status.state, status.last_exit, status.restarts) == ("waiting", 3, 2)
    assert [backoff_s(n) for n in (0, 1, 2, 3, 50)] == [0.0, 0.5, 1.0, 2.0, 15.0]


def test_a_program_that_ignores_sigterm_is_killed(watch: Watch) -> None:
    watched = watch("decode-9")
    status = watched.until(lambda status: status.pid is not None)
    assert status.pid is not None
    process = psutil.Process(status.pid)
    watched.supervisor.stop(0.2)
    assert gone([process])


def test_a_frozen_program_blocks_nobody(watch: Watch) -> None:
    watched = watch("decode-0")
    status = watched.ready()
    assert status.pid is not None
    os.kill(status.pid, signal.SIGSTOP)
    many = [Member(name=f"decode-{n}", role="decode", address="d:1", epoch=n) for n in range(2000)]
    for count in range(1, len(many), 100):  # more than a pipe holds
        watched.supervisor.set_members(many[:count])
    processes = watched.processes(status)
    watched.supervisor.stop(0.2)
    assert gone(processes)


def test_a_router_s_wishes_are_fulfilled_one_by_one_and_nobody_else_has_any(watch: Watch, tmp_path: Path) -> None:
    watched = watch("router-0")
    status = watched.ready()
    assert status.pid is not None
    for wish, problem in ((Drain("decode-0"), None), (Scale("prefill", 2), "no: Scale(role='prefill', count=2)")):
        (tmp_path / "wish").write_bytes(msgspec.json.encode(wish))
        os.kill(status.pid, signal.SIGUSR1)
        watched.hearing.until_line(f"answer: {problem}\n")
    other = watch("decode-0")
    before = other.ready()
    assert before.pid is not None
    os.kill(before.pid, signal.SIGUSR1)
    assert other.until(lambda status: status.state == "waiting").last_exit == -signal.SIGKILL


def test_a_wish_that_goes_wrong_in_a_way_nobody_thought_of_is_answered_and_leaves_room(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch("router-0")
    status = watched.ready()
    assert status.pid is not None
    (tmp_path / "wish").write_bytes(msgspec.json.encode(Drain("prefill-0")))
    for _ in range(MAX_WISHES + 1):
        os.kill(status.pid, signal.SIGUSR1)
        watched.hearing.until_line("answer: it went wrong here; the supervisor's log says how\n")
    assert "nobody thought of this" in caplog.text


def test_two_wishes_for_a_smaller_pool_stop_each_program_once(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterConfig(), tmp_path / "cluster")
    together, names = threading.Barrier(2), [f"decode-{number}" for number in range(3)]

    def ask() -> str | None:
        together.wait(PATIENCE_S)
        return cluster._fulfil(Scale("decode", 1))

    try:
        for name in names:
            cluster.start(name, module="tests.fake_program")
        cluster.wait_ready(PATIENCE_S)
        with ThreadPoolExecutor(2) as threads:
            answers = [asked.result() for asked in [threads.submit(ask) for _ in range(2)]]
        assert answers == [None, None]
        assert cluster.names == ["decode-0"]
        assert [(status := cluster.status(name)) and status.state for name in names] == ["ready", "stopped", "stopped"]
    finally:
        with cluster._programs:
            cluster.stop(cluster.names)
