"""One machine of a cluster that spans several: what `headrace node` runs, and all that a pod runs.

1. prepare   the run directory: the configuration with this machine's own address, the secret
2. start     Ray: its head on the port of `ray.address`, or a node that joins there and offers places for one role
3. control   on the head, once Ray answers: the head process (cluster/head.py), which leaves programs alone as it ends
4. stay      until one of them ends, or SIGTERM. What programs of this machine log comes out of our stderr
5. leave     on SIGTERM, not on the head: `headrace leave`, so that programs drain and go elsewhere; then Ray ends

Ray runs here as a child, with exactly the environment that Headrace needs (cluster/ray_environment.py). Every machine
needs the same path of the run directory, and the same RAY_AUTH_TOKEN or `ray_token` in it.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from cluster.config import environment, secret_from_environment
from cluster.core.addresses import is_own_machine
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError, HeadraceError
from cluster.pipe import Role
from cluster.program import die_with_parent
from cluster.ray_environment import OBJECT_STORE_BYTES, head_environment
from cluster.run_dir import RunDir
from cluster.sessions import end_session

HEAD_MODULE = "cluster.head"
RAY_ANSWERS_S = 120.0
_LOOK_S = 0.5
_RAY_STOP_S = 10.0
_log = logging.getLogger(__name__)

Kind = Literal["head", "prefill", "decode", "router"]


class NodeFailed(HeadraceError):
    """Ray or the controller on this machine ended by itself."""


@dataclass(frozen=True, slots=True)
class Node:
    """What this machine is: `places` programs of its role at most; `ray_options` are for `ray start`."""

    kind: Kind
    places: int
    ray_options: tuple[str, ...]
    modules: Mapping[Role, str]


def ray_command(node: Node, config: ClusterConfig) -> tuple[str, ...]:
    """`ray start` for this machine. Raises ConfigError without `ray.address`, or with a host for this machine alone."""
    address = config.ray.address or ""
    head, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"ray.address: {config.ray.address!r} is not the head's host:port, for example head:6379")
    if is_own_machine(config.host) and not is_own_machine(head):
        raise ConfigError(
            f"host: {config.host!r} is this machine's alone, and ray.address {address!r} is elsewhere: the others "
            "could not reach what runs here; set host to the address of this machine that they can dial"
        )
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={config.host}", "--num-cpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    if node.kind == "head":
        command += ["--head", f"--port={port}", "--include-dashboard=false"]
    else:
        places = msgspec.json.encode({f"headrace_{node.kind}": node.places}).decode()
        command += [f"--address={address}", f"--resources={places}"]
    return (*command, *node.ray_options)


def run_node(node: Node, config: ClusterConfig, run_dir: RunDir) -> None:
    """Be this machine until SIGTERM. Raises ConfigError, NodeFailed."""
    if run_dir.holder() is not None:
        raise ConfigError(f"{run_dir.folder} is in use: another `headrace node` or `headrace up` runs there")
    command = ray_command(node, config)
    if node.kind == "head":
        address = f"{config.host}:{command_port(config)}"
        config = config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
    config = run_dir.prepare(config, secret_from_environment())
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    with _logs_to_stderr(run_dir), _Children(told) as children:
        variables = environment(head_environment(run_dir, config))
        ray = children.start(command, variables)
        if node.kind == "head":
            _wait_for(str(config.ray.address), told, ray)
            if not told.is_set():
                children.start(_head_command(node, run_dir), variables)
            told.wait()
        else:
            _stay(config, run_dir, told)
        if (ended := children.ended) is not None and not run_dir.leaving_file.exists():
            raise NodeFailed(f"{ended} ended by itself; see its messages above")


def command_port(config: ClusterConfig) -> str:
    """The port in `ray.address`."""
    return str(config.ray.address).rpartition(":")[2]


def _head_command(node: Node, run_dir: RunDir) -> tuple[str, ...]:
    modules = msgspec.json.encode(dict(node.modules)).decode()
    return (sys.executable, "-m", HEAD_MODULE, "--run-dir", str(run_dir.folder), "--modules", modules, "--keep")


def _stay(config: ClusterConfig, run_dir: RunDir, told: threading.Event) -> None:
    """Hold the run directory, so that other commands find the cluster from here; on SIGTERM let programs leave."""
    lock = run_dir.hold()
    with lock or contextlib.nullcontext():
        run_dir.address_file.write_text(str(config.ray.address), encoding="utf-8")
        told.wait()
        if run_dir.leaving_file.exists():
            return
        leave = (sys.executable, "-m", "cluster.cli.main", "leave", "--name", config.name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                (*leave, "--root", str(run_dir.folder.parent)), check=False, timeout=config.timing.pod_stop_s
            )


class _Children:
    """Ray and the head process: when one ends, all do. They die with this process, however it ends."""

    def __init__(self, told: threading.Event) -> None:
        self._told = told
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopping = False
        self.ended: str | None = None

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,  # Ctrl-C and a supervisor's signal to the group are for us; children end in order
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        self._running.append(child)
        threading.Thread(target=self._follow, args=(child, " ".join(command[1:4])), daemon=True).start()
        return child

    def _follow(self, child: "subprocess.Popen[bytes]", what: str) -> None:
        code = child.wait()
        if not self._stopping:
            self.ended = f"{what} (exit code {code})"
        self._told.set()

    def __enter__(self) -> "_Children":
        return self

    def __exit__(self, *_: object) -> None:
        """The newest first: the controller's process before its Ray."""
        self._stopping = True
        for child in reversed(self._running):
            child.terminate()
            try:
                child.wait(_RAY_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            end_session(child.pid)


def _wait_for(address: str, told: threading.Event, ray: "subprocess.Popen[bytes]") -> None:
    """Until Ray's head listens; it needs seconds. Raises NodeFailed."""
    host, _, port = address.rpartition(":")
    for _ in range(int(RAY_ANSWERS_S / _LOOK_S)):
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
            return
        if told.wait(_LOOK_S):
            return
    raise NodeFailed(f"Ray does not answer at {address} (process {ray.pid})")


@contextlib.contextmanager
def _logs_to_stderr(run_dir: RunDir) -> Iterator[None]:
    """Let every log of this machine's programs come out of our stderr: that is where `kubectl logs` looks."""
    reading, writing = os.pipe()
    source, sink = os.fdopen(reading, "rb", buffering=0), os.fdopen(os.dup(2), "wb", buffering=0)
    threading.Thread(target=shutil.copyfileobj, args=(source, sink), daemon=True).start()
    run_dir.send_logs_to(f"/proc/{os.getpid()}/fd/{writing}")
    try:
        yield
    finally:
        os.close(writing)
