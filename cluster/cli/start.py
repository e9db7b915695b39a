"""Bringing a cluster up and taking it down.

1. model     fetch the known model if it is not here, with progress bars
2. prepare   the run directory: config.yaml, secret, Ray's token
3. head      start the head process (cluster/head.py); tied to us unless detached
4. wait      follow the statuses it relays until every program is ready, or one clearly cannot start; then until the
             routers have met the workers, so that whoever is told "ready" can ask
5. stop      let go of the head's stdin, or SIGTERM from another terminal; wait until nothing is left
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.cli.web import NoAnswer, NotBelieved, get
from cluster.config import cache_home_from_environment, environment, secret_from_environment
from cluster.controller import ClusterStatus
from cluster.core.access import PublicTlsSettings
from cluster.core.clock import SystemClock, sleep
from cluster.core.config import ClusterConfig
from cluster.core.errors import HeadraceError
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache, is_pulled, resolve
from cluster.pipe import MODULES, Role
from cluster.ray_environment import head_environment
from cluster.run_dir import RunDir
from cluster.sessions import end_session
from cluster.supervisor import ProgramStatus

HEAD_MODULE = "cluster.head"
_UNUSABLE_CONFIG = 2  # the exit code of a program that cannot use its configuration (cluster/program.py)
_HOPELESS_DEATHS = 3
_RAY_S = 15.0  # for Ray to end, after all programs have
_TAIL_LINES = 15
_SERVED_S = 20.0  # for routers to meet workers that are ready: a fraction of a second
_LOOK_S = 0.1
_LATE = "no request could be taken yet; `headrace status` and its /status say why"


class StartFailed(HeadraceError):
    """The cluster could not be brought up; the message ends with what the log says."""


@dataclass(frozen=True, slots=True)
class Started:
    """A cluster that answers. `head` is its head process."""

    head: "subprocess.Popen[bytes]"
    run_dir: RunDir
    status: ClusterStatus


def ensure_model(config: ClusterConfig, console: Console) -> ClusterConfig:
    """Make sure the model is on this machine; the programs then get its folder instead of its name.

    Raises ModelError.
    """
    if config.model == "tracer":
        return config
    cache = default_cache(cache_home_from_environment())
    if config.model in KNOWN_MODELS and not is_pulled(KNOWN_MODELS[config.model], cache):
        pull_model(config.model, console)
    folder = resolve(config.model, cache)
    return config.model_copy(update={"model": str(folder), "served_name": config.model_name})


def pull_model(name: str, console: Console) -> Path:
    """Fetch and convert a known model, with a bar for each stage. Raises ModelError."""
    # Imported here: the converter brings numpy and gguf, which no other command needs.
    from cluster.models.progress import Stage
    from cluster.models.pull import pull

    with Progress(
        SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), console=console,
    ) as bars:  # fmt: skip
        tasks = {}

        def show(stage: Stage, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{stage} {name}", total=None)
            bars.update(tasks[stage], completed=done, total=total or None)

        return pull(name, default_cache(cache_home_from_environment()), show)


@contextmanager
def running_cluster(
    config: ClusterConfig, run_dir: RunDir, console: Console, *, modules: Mapping[Role, str] = MODULES
) -> Iterator[Started]:
    """A cluster that is up inside the `with` and gone after it, however it is left. Raises StartFailed."""
    started = start_cluster(config, run_dir, console, modules=modules, tied=True)
    try:
        yield started
    finally:
        console.print("stopping …", style="dim")
        stop_head(started.head, run_dir)


def start_cluster(
    config: ClusterConfig, run_dir: RunDir, console: Console, *, modules: Mapping[Role, str] = MODULES, tied: bool
) -> Started:
    """Start the head and wait until every program is ready. Raises StartFailed, after stopping what had started."""
    if (pid := run_dir.holder()) is not None:
        raise StartFailed(f"the cluster {config.name} is running already (process {pid}); `headrace down` stops it")
    written = run_dir.prepare(config, secret_from_environment())
    head = _start_head(written, run_dir, modules, tied=tied)
    try:
        status = _wait_until_ready(head, run_dir, console)
        for late, why in wait_until_served(status, _SERVED_S, config.tls.public).items():
            console.print(f"{late}: {why}", markup=False)
        return Started(head, run_dir, status)
    except BaseException:  # Ctrl-C above all
        stop_head(head, run_dir)
        raise


def stop_head(head: "subprocess.Popen[bytes]", run_dir: RunDir) -> None:
    """Ask the head to take everything down and wait until it has; end whatever is left of its session."""
    head.terminate()
    if head.stdin is not None:
        head.stdin.close()
    try:
        head.wait(_patience_s(run_dir))
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    end_session(head.pid)
    run_dir.clear_ray()
    if head.stdout is not None:
        head.stdout.close()


def stop_running(run_dir: RunDir) -> bool:
    """Take down a cluster that another process started. False when none was running."""
    if (pid := run_dir.holder()) is None:
        run_dir.clear_ray()  # a killed head could not
        return False
    try:
        head = psutil.Process(pid)
        head.send_signal(signal.SIGINT)  # a head that spans machines would survive SIGTERM's meaning (cluster/head.py)
        head.wait(_patience_s(run_dir))
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        head.kill()
        end_session(pid)
    run_dir.clear_ray()
    return True


def _patience_s(run_dir: RunDir) -> float:
    return run_dir.config().timing.cluster_stop_s + _RAY_S


def tail(file: Path) -> str:
    """The last lines of a log, for a person."""
    if not file.exists():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "".join(f"\n    {line}" for line in lines)


def _start_head(
    config: ClusterConfig, run_dir: RunDir, modules: Mapping[Role, str], *, tied: bool
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", HEAD_MODULE, "--run-dir", str(run_dir.folder)]
    command += ["--modules", msgspec.json.encode(dict(modules)).decode(), *(["--tied"] if tied else [])]
    with run_dir.log_file("head").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(head_environment(run_dir, config)),
            start_new_session=True,  # the terminal's Ctrl-C is for us; we then stop it in order
        )


def _wait_until_ready(head: "subprocess.Popen[bytes]", run_dir: RunDir, console: Console) -> ClusterStatus:
    assert head.stdout is not None
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as bars:  # fmt: skip
        task = bars.add_task("starting Ray", total=None)
        for line in head.stdout:
            status = msgspec.json.decode(line, type=ClusterStatus)
            ready = sum(program.state == "ready" for program in status.programs)
            late = ", ".join(program.name for program in status.programs if program.state != "ready")
            bars.update(task, total=sum(status.desired.values()), completed=ready, description=f"loading {late}")
            if status.ready:
                return status
            for program in filter(_hopeless, status.programs):
                log = run_dir.log_file(program.name)
                raise StartFailed(f"{program.name} does not start (exit code {program.last_exit}): {log}{tail(log)}")
    log = run_dir.log_file("head")
    raise StartFailed(f"the head process ended with {head.wait()}: {log}{tail(log)}")


def wait_until_served(status: ClusterStatus, patience_s: float, tls: PublicTlsSettings | None = None) -> dict[str, str]:
    """Wait until every router would take a request, which takes a decode worker. Returns who would not, and why.

    A router whose certificate we do not believe is not waited for: it may well serve those who do.
    """
    waiting = {p.name: p.ready.http for p in status.programs if p.ready is not None and p.ready.http is not None}
    tls, strange = tls or PublicTlsSettings(), dict[str, str]()
    if not status.desired.get("decode"):
        return {}
    clock = SystemClock()
    latest = clock.now() + patience_s
    while waiting := {name: url for name, url in waiting.items() if not _serves(name, url, tls, strange)}:
        if clock.now() >= latest:
            break
        sleep(_LOOK_S)
    return strange | dict.fromkeys(waiting, _LATE)


def _serves(name: str, url: str, tls: PublicTlsSettings, strange: dict[str, str]) -> bool:
    """Or there is no use in asking again: then `strange` says why."""
    try:
        return get(f"{url}/ready", tls, within_s=_LOOK_S * 10)[0] == 200
    except NotBelieved as error:
        strange[name] = f"its certificate is not believed here: {error}; see tls.public.ca_file and server_name"
        return True
    except NoAnswer:  # not yet
        return False


def _hopeless(program: ProgramStatus) -> bool:
    """It will not become ready by trying again: a bad configuration, or several deaths in a row."""
    return program.last_exit == _UNUSABLE_CONFIG or program.early_deaths >= _HOPELESS_DEATHS
