"""A real local Ray with a controller, supervisors and fake programs: killed, scaled, adopted, taken down."""

import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest
from rich.console import Console

from cluster.cli.start import Started, StartFailed, start_cluster, stop_head, stop_running
from cluster.config import load_config
from cluster.controller import ClusterStatus
from cluster.core.config import ClusterConfig, RaySettings
from cluster.pipe import ROLES, Drain, Role, Scale, Wish
from cluster.run_dir import RunDir
from cluster.supervisor import ProgramStatus
from tests.architecture.source import ROOT
from tests.fake_program import Hearing
from tests.listening import listening

PATIENCE_S = 30.0
GRPC, HTTP, OPEN = "gRPC, its token", "HTTP, its token", "nothing: numbers of its autoscaler; loopback, network policy"
RAYS = {
    "cluster.head": GRPC,
    "gcs_server": GRPC,
    "raylet/raylet": GRPC,
    "ray::ControllerActor": GRPC,
    "ray::SupervisorActor": GRPC,
    "ray::RuntimeEnvAgent": HTTP,
    "autoscaler/_private/monitor.py": OPEN,
}
"""Who listens for Ray, and what it wants of a stranger."""

RAYS_METHODS = (
    "/ray.rpc.ActorInfoGcsService/ListNamedActors",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
MODULES: dict[Role, str] = dict.fromkeys(ROLES, "tests.fake_program")


class Cluster:
    """A running cluster; `until` reads the statuses that its head relays."""

    def __init__(
        self, root: Path, config: ClusterConfig, modules: Mapping[Role, str] = MODULES, *, redis_url: str | None = None
    ) -> None:
        self.root = root
        self.run_dir = RunDir(root / "test")
        self.console = io.StringIO()
        started: Started = start_cluster(
            config.model_copy(update={"name": "test", "ray": RaySettings(num_cpus=1, redis_url=redis_url)}),
            self.run_dir,
            Console(file=self.console),
            modules=modules,
            tied=True,
        )
        self.head = started.head
        self.last = started.status
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.head.stdout is not None
        for line in self.head.stdout:
            self._lines.put(line)
        self.head.wait()  # `down` in another process waits until its parent has taken note

    def until(self, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        while not condition(self.last):
            try:
                line = self._lines.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"nothing has changed for {PATIENCE_S} s: {self.last}") from None
            self.last = msgspec.json.decode(line, type=ClusterStatus)
        return self.last

    def program(self, name: str) -> ProgramStatus:
        return next(program for program in self.last.programs if program.name == name)

    def comes_back(self, before: ProgramStatus) -> ProgramStatus:
        """Until the program is ready again, as another peer."""
        assert before.ready is not None
        epoch = before.ready.epoch
        self.until(lambda s: any(p.name == before.name and p.ready and p.ready.epoch != epoch for p in s.programs))
        return self.program(before.name)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "cluster.cli.main", *arguments, "--name", "test", "--root", str(self.root)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def processes(self) -> list[psutil.Process]:
        """The head and everything below it."""
        head = psutil.Process(self.head.pid)
        return [head, *head.children(recursive=True)]


def processes_of(program: ProgramStatus) -> list[psutil.Process]:
    assert program.ready is not None
    return [psutil.Process(pid) for pid in program.ready.pids]


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("ray"), ClusterConfig())
    yield one
    stop_head(one.head, one.run_dir)


@pytest.fixture(autouse=True)
def _is_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared cluster as it found it."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").until(lambda status: status.ready)


def test_what_up_left_behind_is_what_status_shows(cluster: Cluster) -> None:
    shown = cluster.command("status", "--json")
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    assert status["ready"] is True
    assert [program["name"] for program in status["programs"]] == ["decode-0", "prefill-0", "router-0"]
    for file in (cluster.run_dir.secret_file, cluster.run_dir.token_file):
        assert file.stat().st_mode & 0o777 == 0o600
    assert cluster.command("status").stdout.count("ready") == 3


def test_programs_are_no_nicer_than_who_started_them(cluster: Cluster) -> None:
    pids = [pid for program in cluster.last.programs if program.ready for pid in program.ready.pids]
    assert len(pids) >= 5  # two workers with their engines, and a router
    assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process().nice()}


def test_a_second_up_is_refused(cluster: Cluster) -> None:
    with pytest.raises(StartFailed, match="running already"):
        start_cluster(load_config(None, ["name=test"]), cluster.run_dir, Console(file=io.StringIO()), tied=True)


def test_every_listener_is_on_the_loopback_interface(cluster: Cluster) -> None:
    assert {one.host for one in listening(cluster.processes())} == {"127.0.0.1"}


def answers(address: str) -> set[grpc.StatusCode]:
    """To calls without a token, of the services that Ray's processes have."""
    codes = set()
    with grpc.insecure_channel(address) as wire:
        for method in RAYS_METHODS:
            try:
                wire.unary_unary(method, bytes, bytes)(b"", timeout=PATIENCE_S)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as refused:
                codes.add(refused.code())
    return codes


def assert_asks_for_its_token(what: str, address: str) -> None:
    """One of RAYS, by what it says to a stranger there."""
    if RAYS[what] == GRPC:
        assert answers(address) == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}, what
    elif RAYS[what] == HTTP:
        asked = urllib.request.Request(f"http://{address}/get_or_create_runtime_env", b"", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=PATIENCE_S)
        with refused.value:
            assert refused.value.code == 401, what


def test_every_socket_of_ray_is_on_the_list_and_asks_for_its_token(cluster: Cluster) -> None:
    """Found by looking: a Ray that opens another one, or opens one up, fails here (docs/security.md)."""
    found = [(one.what(RAYS), one.port) for one in listening(cluster.processes())]
    always = {what for what, wants in RAYS.items() if wants != OPEN}  # that one gives up where another Ray has its port
    assert always <= {what for what, _ in found} <= set(RAYS), "a longer list needs a reason and a control"
    for what, port in found:
        assert_asks_for_its_token(what, f"127.0.0.1:{port}")


def test_the_security_page_names_every_socket_on_the_list_and_what_it_wants() -> None:
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("|") and "**Ray**" in line]
    asks = {GRPC: ("gRPC", "Ray's token"), HTTP: ("HTTP", "Ray's token"), OPEN: ("HTTP", "nothing")}
    told = {
        name: (row[1].strip().partition(",")[0], row[3].strip())
        for row in rows
        for name in RAYS
        if f"`{name}`" in row[2]
    }
    assert told == {name: asks[wants] for name, wants in RAYS.items()}
    assert all("control" in row[4] or row[4].strip() == "the same" for row in rows)


def test_ray_turns_away_who_has_no_token(cluster: Cluster) -> None:
    address = cluster.run_dir.ray_address()
    assert address is not None
    with grpc.insecure_channel(address) as wire:
        call = wire.unary_unary("/ray.rpc.ActorInfoGcsService/ListNamedActors", bytes, bytes)
        for metadata in ((), (("authorization", "Bearer " + "0" * 64),)):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=metadata, timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        token = cluster.run_dir.token_file.read_text().strip()
        assert call(b"\x08\x01", metadata=(("authorization", f"Bearer {token}"),), timeout=PATIENCE_S)


def test_a_killed_program_rejoins_with_a_new_epoch_and_everybody_hears_it(cluster: Cluster) -> None:
    before = cluster.program("decode-0")
    processes = processes_of(before)
    with Hearing(cluster.run_dir.folder, "router-0") as hearing:
        processes[0].kill()
        after = cluster.comes_back(before)
        cluster.until(lambda status: status.ready)
        hearing.until(*(p.ready.member() for p in cluster.last.programs if p.ready is not None))
    assert gone(processes)
    assert after.restarts == before.restarts + 1
    assert after.supervisor == before.supervisor


def test_a_killed_supervisor_takes_its_program_along_and_both_come_back(cluster: Cluster) -> None:
    before = cluster.program("prefill-0")
    processes = processes_of(before)
    psutil.Process(processes[0].ppid()).kill()
    assert gone(processes[:1])
    processes[1].kill()  # an engine notices by its socket; the fake program's child has none
    after = cluster.comes_back(before)
    assert after.supervisor != before.supervisor


def test_a_killed_controller_is_replaced_and_adopts_what_runs(cluster: Cluster) -> None:
    before = {program.name: program for program in cluster.last.programs}
    controller = [p for p in cluster.processes() if "ControllerActor" in " ".join(p.cmdline())]
    version = cluster.last.version
    controller[0].kill()
    cluster.until(lambda status: status.version < version and status.ready)
    assert {program.name: program for program in cluster.last.programs} == before
    decode = cluster.program("decode-0")
    processes_of(decode)[0].kill()  # supervisors find the new controller
    cluster.comes_back(decode)


def test_pools_scale_independently_and_back(cluster: Cluster) -> None:
    with Hearing(cluster.run_dir.folder, "router-0") as hearing:
        assert cluster.command("scale", "decode", "3").returncode == 0
        cluster.until(lambda status: status.ready and status.desired["decode"] == 3)
        hearing.until_line('desired: {"prefill":1,"decode":3,"router":1}\n')
    names = [program.name for program in cluster.last.programs]
    assert names == ["decode-0", "decode-1", "decode-2", "prefill-0", "router-0"]
    leaving = processes_of(cluster.program("decode-1")) + processes_of(cluster.program("decode-2"))
    assert cluster.command("scale", "decode=1", "prefill=2").returncode == 0
    cluster.until(lambda status: status.ready and status.desired == {"decode": 1, "prefill": 2, "router": 1})
    assert gone(leaving)
    assert cluster.command("scale", "prefill", "1").returncode == 0
    cluster.until(lambda status: status.ready and status.desired["prefill"] == 1)
    assert cluster.command("scale", "boss", "1").returncode == 1


def test_a_drained_program_is_replaced_and_did_not_die(cluster: Cluster) -> None:
    before = cluster.program("decode-0")
    processes = processes_of(before)
    done = cluster.command("drain", "decode-0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decode-0 has drained\ndecode-0 is ready again\n"
    assert gone(processes)
    after = cluster.comes_back(before)
    assert (after.restarts, after.early_deaths) == (0, 0)
    refused = cluster.command("drain", "decode-1")
    assert refused.returncode == 1
    assert "'decode-1' does not run here: it is one of decode-0, prefill-0, router-0" in refused.stderr


def test_what_a_router_asks_for_is_done_by_the_controller(cluster: Cluster) -> None:
    """As the dashboard does: the router has neither Ray nor its token."""
    router = processes_of(cluster.program("router-0"))[0]
    with Hearing(cluster.run_dir.folder, "router-0") as hearing:

        def ask(wish: Wish, problem: str | None) -> None:
            (cluster.run_dir.folder / "wish").write_bytes(msgspec.json.encode(wish))
            router.send_signal(signal.SIGUSR1)
            hearing.until_line(f"answer: {problem}\n")

        ask(Scale("decode", 2), None)
        cluster.until(lambda status: status.ready and status.desired["decode"] == 2)
        leaving = processes_of(cluster.program("decode-1"))
        ask(Drain("decode-1"), None)
        assert gone(leaving)
        known = "decode-0, decode-1, prefill-0, router-0"
        cluster.until(lambda status: status.ready)
        ask(Drain("decode-9"), f"the controller could not do it: 'decode-9' does not run here: it is one of {known}")
        ask(Scale("decode", 1), None)
        cluster.until(lambda status: status.ready and status.desired["decode"] == 1)


def test_down_leaves_nothing(cluster: Cluster) -> None:
    """Last of the shared cluster's tests: it ends it."""
    processes = cluster.processes()
    assert len(processes) > 10
    done = cluster.command("down")
    assert done.returncode == 0, done.stderr
    assert gone(processes)
    assert cluster.run_dir.holder() is None
    assert not stop_running(cluster.run_dir)
    refused = cluster.command("status")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is not running" in refused.stderr


def test_a_killed_head_takes_everything_along(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ClusterConfig())
    processes = cluster.processes()
    children = [process for process in processes if "signal.pause" in " ".join(process.cmdline())]
    os.kill(cluster.head.pid, signal.SIGKILL)
    cluster.head.wait()
    for child in children:  # an engine notices by its socket; the fake programs' children have none
        child.kill()
    ray_folder = Path((cluster.run_dir.folder / "ray_folder").read_text())
    assert ray_folder.is_dir()
    stop_head(cluster.head, cluster.run_dir)
    assert gone(processes)
    assert not ray_folder.exists()
