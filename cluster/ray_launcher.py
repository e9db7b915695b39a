"""Ray, and the one file that imports it: a named detached controller, one detached supervisor actor per program.

1. head        (cluster/head.py) starts a local Ray or joins `ray.address`, creates the controller, relays its status;
               starts its GCS again when that dies (cluster/gcs_keeper.py)
2. controller  an asyncio actor around cluster/controller.py; Ray restarts it, and it adopts what runs
3. supervisor  an actor around cluster/supervisor.py, placed by its role's custom resource, so that pools are sized
               independently; Ray restarts it, its program dies with it and is started anew
4. down        SIGTERM (or, tied, the end of stdin): stop every program in order, then Ray

Actors are detached, because a killed controller takes its other actors with it. They import nothing heavy. Nothing but
statuses, counts and member lists passes through Ray: no token and no KV byte.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayError

from cluster.config import ray_redis_from_environment
from cluster.controller import ClusterStatus, Controller, LaunchFailed, leave_when_done
from cluster.core.clock import SystemClock
from cluster.core.config import ClusterConfig
from cluster.core.errors import HeadraceError
from cluster.gcs_keeper import GcsKeeper
from cluster.layout import Layout
from cluster.pipe import Drain, Member, Role, Wish
from cluster.ray_environment import OBJECT_STORE_BYTES
from cluster.ray_password import conceal_in
from cluster.reporter import Reporter
from cluster.run_dir import RunDir
from cluster.store import Counts, initial_counts, open_store
from cluster.supervisor import ProgramStatus, Supervisor

if TYPE_CHECKING:
    from cluster.redis_store import GcsTables

CONTROLLER = "headrace-controller"
_GCS = "gcs_server"
_PREFIX = "headrace-"
_PROGRAMS_PER_NODE = 1024
_ON_THE_HEAD = {"node:__internal_head__": 0.001}  # beside Redis' password, and never in the way of a leaving node
_ANSWER_S = 5.0
_GCS_ANSWER_S = 20.0  # to make or end an actor; without a GCS Ray would wait for ever
_FOREVER_S = 3600.0
_LEAVES = 2  # DRAIN_NODE_REASON_PREEMPTION
_log = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Callable[[ClusterStatus], None]  # where `headrace up` hears a status


class SupervisorActor:
    """One program. Calls are served one at a time and in order, so the newest members list wins."""

    def __init__(self, layout: Layout, name: str) -> None:
        layout.log_to_file(name)
        self._run_dir = layout.run_dir
        self._patience_s = self._run_dir.config().timing.supervisor_stop_s
        self._controller: ray.actor.ActorHandle | None = None
        self._reporter = Reporter(self._tell)
        spec = layout.spec(name, ray.get_runtime_context().get_node_id())
        self._supervisor = Supervisor(spec, self._report, fulfil=self._fulfil)
        self._supervisor.start()

    def _report(self, status: ProgramStatus) -> None:
        self._run_dir.mark_ready(status.name, status.state == "ready")
        self._reporter.report(status)

    def _tell(self, status: ProgramStatus) -> bool:
        try:
            if self._controller is None:
                self._controller = ray.get_actor(CONTROLLER)
            ray.get(self._controller.report.remote(status), timeout=_ANSWER_S)
        except (ValueError, RayError):
            self._controller = None
        return self._controller is not None

    def _fulfil(self, wish: Wish) -> str | None:
        try:
            controller = ray.get_actor(CONTROLLER)
            if isinstance(wish, Drain):
                ray.get(controller.drain.remote(wish.program), timeout=2 * self._patience_s)
            else:
                ray.get(controller.scale.remote({wish.role: wish.count}), timeout=_ANSWER_S)
        except (ValueError, RayError, HeadraceError) as error:
            return f"the controller could not do it: {getattr(error, 'cause', None) or error}"
        return None

    def status(self) -> ProgramStatus:
        return self._supervisor.status()

    def set_members(self, members: tuple[Member, ...]) -> None:
        self._supervisor.set_members(members)

    def set_desired(self, desired: Counts | None) -> None:
        self._supervisor.set_desired(desired)

    def stop(self) -> None:
        self._supervisor.stop(self._patience_s)


class ControllerActor:
    """The controller as an asyncio actor."""

    async def __init__(self, layout: Layout) -> None:  # type: ignore[misc]  # Ray awaits an asyncio actor's constructor
        layout.log_to_file("controller")
        config = layout.run_dir.config()
        store = open_store(config, layout.run_dir.desired_file)
        self._controller = Controller(RayLauncher(layout), store, initial_counts(config))
        self._running = asyncio.ensure_future(self._controller.run())
        self._running.add_done_callback(leave_when_done)

    async def report(self, status: ProgramStatus) -> None:
        self._controller.report(status)

    async def status_after(self, version: int, timeout_s: float) -> ClusterStatus:
        return await self._controller.status_after(version, timeout_s)

    async def scale(self, counts: Mapping[Role, int]) -> None:
        await self._controller.scale(counts)

    async def drain(self, name: str) -> None:
        await self._controller.drain(name)

    async def stop_all(self) -> None:
        await self._controller.stop_all()


class RayLauncher:
    """The controller's hands: supervisors as detached named actors of this namespace."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._patience_s = layout.run_dir.config().timing.supervisor_stop_s + _ANSWER_S
        self._handles: dict[str, ray.actor.ActorHandle] = {}

    async def start(self, name: str, role: Role) -> None:
        options = {
            "name": _PREFIX + name,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": 0,
            "resources": {f"headrace_{role}": 1},
        }
        create = functools.partial(ray.remote(SupervisorActor).options(**options).remote, self._layout, name)
        self._handles[name] = await _in_thread(create, _GCS_ANSWER_S)

    async def stop(self, name: str) -> None:
        handle = await self._handle(name)
        try:
            await asyncio.wait_for(handle.stop.remote(), self._patience_s)
        except (RayError, TimeoutError) as error:
            _log.warning("%s did not stop in order: %s", name, error)
        await _in_thread(functools.partial(ray.kill, handle, no_restart=True), _GCS_ANSWER_S)
        self._handles.pop(name, None)
        while name in await self._names():  # noqa: ASYNC110 - Ray frees the name a little later, and tells nobody
            await asyncio.sleep(0.05)

    async def statuses(self) -> dict[str, ProgramStatus | None]:
        names = await self._names()
        found = await asyncio.gather(*(self._status(name) for name in names))
        return dict(zip(names, found, strict=True))

    def push(self, name: str, members: tuple[Member, ...], desired: Counts | None) -> None:
        if (handle := self._handles.get(name)) is None:
            raise LaunchFailed(f"no supervisor of {name} is known")
        with contextlib.suppress(AttributeError):  # a supervisor of an older version does not know of it
            handle.set_desired.remote(desired)
        handle.set_members.remote(members)

    async def _names(self) -> list[str]:
        listed = await _in_thread(ray.util.list_named_actors, _ANSWER_S)
        return sorted(n.removeprefix(_PREFIX) for n in listed if n.startswith(_PREFIX) and n != CONTROLLER)

    async def _status(self, name: str) -> ProgramStatus | None:
        try:
            handle = await self._handle(name)
            return cast("ProgramStatus", await asyncio.wait_for(handle.status.remote(), _ANSWER_S))
        except (LaunchFailed, RayError, TimeoutError) as error:
            self._handles.pop(name, None)
            _log.warning("the supervisor of %s does not answer: %s", name, error)
            return None

    async def _handle(self, name: str) -> "ray.actor.ActorHandle":
        if name not in self._handles:
            self._handles[name] = await _in_thread(functools.partial(ray.get_actor, _PREFIX + name), _ANSWER_S)
        return self._handles[name]


def start_hook(parameters: "ray._private.parameter.RayParams", head: bool) -> None:
    """`ray start` calls it first (RAY_START_HOOK): it has no other way to hear of a password but its command line."""
    if head:
        parameters.ray_client_server_port = None  # a second door to run code at, which no option of Ray's closes
        username, password = ray_redis_from_environment()
        parameters.redis_username = parameters.redis_username or username
        parameters.redis_password = parameters.redis_password or password
        conceal_in(ray._private.services, parameters.redis_password)


class Head:
    """The process that owns a cluster on this machine. The caller holds the run directory's lock."""

    def __init__(self, run_dir: RunDir, modules: Mapping[Role, str]) -> None:
        self._run_dir = run_dir
        self._layout = Layout(str(run_dir.folder), dict(modules))
        self._ended = threading.Event()
        self._leaving = threading.Event()
        self._tables: GcsTables | None = None
        self._kept = False

    def _end(self, *, keep: bool) -> None:
        self._kept = keep
        self._ended.set()

    def run(self, tell: Answer, *, tied: bool, keep: bool) -> int:
        """Start, relay every status to `tell`, wait for the end, stop everything; with `keep`, not on SIGTERM."""
        config = self._run_dir.config()
        try:
            self._start_ray(config)
            signal.signal(signal.SIGINT, lambda *_: self._ended.set())
            signal.signal(signal.SIGTERM, lambda *_: self._end(keep=keep))
            controller = self._start_controller()
            helpers: list[Callable[[], None]] = [functools.partial(self._relay, controller, tell)]
            helpers += [self._follow_stdin] if tied else []
            if config.ray.address is None:
                helpers.append(GcsKeeper(_LocalGcs(), self._tables, SystemClock(), self._leaving.wait).run)
            for work in helpers:
                threading.Thread(target=work, daemon=True).start()
            self._ended.wait()
            return 0 if self._kept else self._stop(controller, config.timing.cluster_stop_s)
        finally:
            self._leaving.set()
            ray.shutdown()
            self._run_dir.clear_ray()
            if self._tables is not None:
                self._tables.close()

    def _start_ray(self, config: ClusterConfig) -> None:
        common: dict[str, object] = {"namespace": config.name, "log_to_driver": False, "logging_level": "warning"}
        if config.ray.address is not None:
            context = ray.init(address=config.ray.address, **common)
        else:
            if config.ray.redis_url is not None:
                # Imported only where it is used: actors, and clusters without Redis, should not pay for the client.
                from cluster.redis_store import gcs_tables

                self._tables = tables = gcs_tables(config.ray.redis_url, self._run_dir)
                tables.clear()  # what a killed head left: its actors must not come back
                conceal_in(ray._private.services, tables.server.password)
                common |= {"_redis_username": tables.server.username, "_redis_password": tables.server.password}
            context = ray.init(
                address="local",
                num_cpus=config.ray.num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                resources={f"headrace_{role}": _PROGRAMS_PER_NODE for role in self._layout.modules},
                _temp_dir=str(self._run_dir.ray_folder()),
                **common,
            )
        self._run_dir.address_file.write_text(context.address_info["gcs_address"], encoding="utf-8")

    def _start_controller(self) -> "ray.actor.ActorHandle":
        options = {"name": CONTROLLER, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        options["resources"] = _ON_THE_HEAD
        restarts = {"max_restarts": -1, "max_task_retries": -1}
        return ray.remote(ControllerActor).options(**options, **restarts).remote(self._layout)

    def _relay(self, controller: "ray.actor.ActorHandle", tell: Answer) -> None:
        version = -1
        try:
            while not self._ended.is_set():
                status = ray.get(controller.status_after.remote(version, _FOREVER_S))
                if status.version != version:
                    tell(status)
                version = status.version
        except RayError as error:
            if not self._ended.is_set():
                _log.error("Ray is gone: %s", error)
        except BrokenPipeError:  # `up` has seen enough
            return
        self._ended.set()

    def _follow_stdin(self) -> None:
        """Tied to `up`: its end is ours, however it ends."""
        while os.read(0, 4096):  # not sys.stdin, whose lock this thread would still hold when the interpreter leaves
            continue
        self._ended.set()

    @staticmethod
    def _stop(controller: "ray.actor.ActorHandle", patience_s: float) -> int:
        try:
            ray.get(controller.stop_all.remote(), timeout=patience_s)
            ray.kill(controller, no_restart=True)
        except (RayError, GetTimeoutError) as error:
            _log.error("not everything stopped in order: %s", error)
            return 1
        return 0


class _LocalGcs:
    """The GCS of the Ray that this process started, as Ray's own bookkeeping has it: `ray.shutdown` must end it too."""

    def __init__(self) -> None:
        self._node = ray._private.worker._global_node

    def wait(self) -> int | None:
        for process in self._node.all_processes.get(_GCS, ()):
            return cast("int", process.process.wait())
        return None

    def start(self) -> None:
        try:
            self._node.kill_gcs_server(check_alive=False)
            self._node.start_gcs_server()
        except OSError as error:
            raise LaunchFailed(str(error)) from error


class Client:
    """Another process's way to a running cluster's controller."""

    def __init__(self, run_dir: RunDir) -> None:
        """Connect. Raises LaunchFailed when no cluster answers."""
        address = run_dir.ray_address()
        if address is None or run_dir.holder() is None:
            raise LaunchFailed("the cluster is not running; start it with `headrace up`")
        config = run_dir.config()
        name, self._patience_s = config.name, config.timing.cluster_stop_s
        try:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()  # Ray would try for minutes
            ray.init(address=address, namespace=name, log_to_driver=False, logging_level="error")
            self._controller = ray.get_actor(CONTROLLER)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise LaunchFailed(f"the cluster {name} does not answer: {error}") from error

    def status(self, after: int = -1, timeout_s: float = _ANSWER_S) -> ClusterStatus:
        """The status once its version is not `after`, or when the time is up. Raises LaunchFailed."""
        reply = self._controller.status_after.remote(after, timeout_s)
        return cast("ClusterStatus", self._get(reply, timeout_s + _ANSWER_S))

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Change desired counts. Raises LaunchFailed with the controller's reason."""
        self._get(self._controller.scale.remote(dict(counts)), _ANSWER_S)

    def drain(self, name: str) -> None:
        """Drain one program; returns when it is gone, and its successor is about to start. Raises LaunchFailed."""
        self._get(self._controller.drain.remote(name), self._patience_s)

    def leave(self) -> list[str]:
        """Take no more programs onto this machine and drain those here; returns when they are gone."""
        node = ray.get_runtime_context().get_node_id()
        self._refuse_programs(node)
        names = [program.name for program in self.status().programs if program.node == node]
        self._get([self._controller.drain.remote(name) for name in names], self._patience_s)
        return names

    def _refuse_programs(self, node: str) -> None:
        """As cloud providers announce that a machine goes: Ray places nothing there any more."""
        gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        deadline_ms = int((SystemClock().wall() + self._patience_s) * 1000)
        try:
            accepted, reason = gcs.drain_node(node, _LEAVES, "headrace leave", deadline_ms)
        except (RayError, RuntimeError) as error:
            accepted, reason = False, str(error)
        if not accepted:
            raise LaunchFailed(f"Ray does not let this machine leave: {reason}")

    def close(self) -> None:
        ray.shutdown()

    @staticmethod
    def _get(reply: object, timeout_s: float) -> object:
        try:
            return ray.get(reply, timeout=timeout_s)
        except (RayError, HeadraceError) as error:
            raise LaunchFailed(f"the controller could not do it: {error}") from error


async def _in_thread(call: Callable[[], T], patience_s: float) -> T:
    """Ray's own calls block on its GCS; the controller's loop must not, and goes on without an answer.

    The call itself cannot be taken back: it may still be carried out when the GCS is there again. Raises LaunchFailed.
    """
    try:
        return await asyncio.wait_for(asyncio.to_thread(call), patience_s)
    except TimeoutError as error:
        raise LaunchFailed(f"Ray did not answer within {patience_s:g} s") from error
    except (RayError, ValueError, ConnectionError, RuntimeError) as error:
        raise LaunchFailed(str(error)) from error
