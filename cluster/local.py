"""A cluster without Ray: supervisors as threads of this process. For tests, benchmarks and small experiments.

The programs, the pipe protocol, the streams and the engines are the real ones; only the control plane is missing.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.core.clock import Clock, SystemClock
from cluster.core.config import ClusterConfig
from cluster.core.errors import Unavailable
from cluster.pipe import MODULES, ROLES, Drain, Ready, Wish, role_of
from cluster.ray_environment import program_environment
from cluster.reconcile import Start, Stop, reconcile
from cluster.run_dir import RunDir
from cluster.supervisor import ProgramSpec, ProgramStatus, Supervisor


class LocalCluster:
    """Programs of one cluster, started and restarted by supervisors in this process. Use as a context manager."""

    def __init__(self, config: ClusterConfig, folder: Path, clock: Clock | None = None) -> None:
        """`folder` becomes the run directory (configuration, secret, logs)."""
        self._clock = clock or SystemClock()
        self._run_dir = RunDir(folder)
        self.config = self._run_dir.prepare(config, None)
        self._changed = threading.Condition()
        self._status: dict[str, ProgramStatus] = {}
        self._supervisors: dict[str, Supervisor] = {}
        self._programs = threading.RLock()  # held while programs come and go: wishes have threads of their own
        self._ended = False

    def __enter__(self) -> Self:
        for role, count in (
            ("prefill", self.config.pools.prefill.replicas),
            ("decode", self.config.pools.decode.replicas),
            ("router", self.config.router.replicas),
        ):
            for index in range(count):
                self.start(f"{role}-{index}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._programs:
            self._ended = True
            self.stop(list(self._supervisors))

    def start(self, name: str, module: str | None = None) -> None:
        """Start one program, for example `decode-1`. `module`: another entry point that plays this role."""
        entry = module or MODULES[role_of(name)]
        command = (sys.executable, "-m", entry, "--config", str(self._run_dir.config_file))
        spec = ProgramSpec(
            name,
            role_of(name),
            (*command, "--name", name, "--supervised"),
            program_environment(),
            self._run_dir.log_file(name),
        )
        with self._programs:
            supervisor = self._supervisors[name] = Supervisor(spec, self._report, fulfil=self._fulfil)
            supervisor.start()

    def stop(self, names: Iterable[str]) -> None:
        """Stop programs in order, all at the same time; returns when nothing of them is left."""
        patience_s = self.config.timing.supervisor_stop_s
        with self._programs:
            stopping = [threading.Thread(target=self._supervisors.pop(name).stop, args=(patience_s,)) for name in names]
            for thread in stopping:
                thread.start()
            for thread in stopping:
                thread.join()

    def status(self, name: str) -> ProgramStatus | None:
        """What the program's supervisor last said."""
        with self._changed:
            return self._status.get(name)

    def ready(self, name: str) -> Ready:
        """What a running program reported. Raises Unavailable when it is not ready."""
        status = self.status(name)
        if status is None or status.ready is None:
            raise Unavailable(f"{name} is not ready; its log: {self.log(name)[-2000:]}")
        return status.ready

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Until every started program is ready. Raises Unavailable, with the log of one that is not."""
        self.wait(self._all_ready, timeout_s)
        for name in self._supervisors:
            self.ready(name)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Until `condition`, looked at after each change of a program's state. False when time ran out."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    @property
    def url(self) -> str:
        """Base URL of the first router. Raises Unavailable."""
        return self.ready("router-0").http or ""

    @property
    def admin_url(self) -> str:
        """Base URL of what the first router tells of itself and its workers. Raises Unavailable."""
        return self.ready("router-0").admin or ""

    @property
    def grpc_address(self) -> str:
        """gRPC address of the first router. Raises Unavailable."""
        return self.ready("router-0").address

    @property
    def names(self) -> list[str]:
        return list(self._supervisors)

    def log(self, name: str) -> str:
        """Everything a program has logged."""
        file = self._run_dir.log_file(name)
        return file.read_text(errors="replace") if file.exists() else ""

    def _fulfil(self, wish: Wish) -> str | None:
        """What operators ask of a cluster without a controller, at once; a program that has to go drains first."""
        if isinstance(wish, Drain):
            supervisor = self._supervisors.get(wish.program)
            if supervisor is None:
                return f"{wish.program!r} does not run here: it is one of {', '.join(sorted(self._supervisors))}"
            supervisor.drain()
            return None
        with self._programs:  # the next wish is compared with what this one leaves
            if self._ended:
                return "the cluster is stopping"
            ready = {name: supervisor.status().ready is not None for name, supervisor in self._supervisors.items()}
            actions = reconcile({wish.role: wish.count}, ready)
            self.stop([action.name for action in actions if isinstance(action, Stop)])
            for action in actions:
                if isinstance(action, Start):
                    self.start(action.name)
        return None

    def _all_ready(self) -> bool:
        known = [self._status.get(name) for name in self._supervisors]
        return all(status is not None and status.ready is not None for status in known)

    def _report(self, status: ProgramStatus) -> None:
        with self._changed:
            self._status[status.name] = status
            members = [s.ready.member() for s in self._status.values() if s.ready is not None]
            self._changed.notify_all()
        supervisors = dict(self._supervisors)
        roles = [role_of(name) for name in supervisors]
        for supervisor in supervisors.values():
            supervisor.set_desired({role: roles.count(role) for role in ROLES})
            supervisor.set_members(members)
