"""The router program: one dispatcher behind two doors, OpenAI HTTP and gRPC.

1. load the tokenizer and the chat template; open both doors (not ready yet)
2. find workers: the supervisor's list, or the last one that was heard here; and `seeds:` of the configuration
3. serve until told to stop
4. drain: /ready and gRPC health say no, the listener closes, requests on open connections get 503 and Retry-After,
   running streams end within `timing.drain_s`

With `router.share_ports` the routers of a host listen on the same two ports: the kernel gives each connection to one of
them. Each is a whole router with its own books, and listens on two ports of its own besides, which it reports: there
/ready, /metrics and /debug speak of this one router, and on the shared port of whichever took the connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from cluster.core.clock import Clock, SystemClock
from cluster.core.config import RouterSettings
from cluster.core.errors import ConfigError
from cluster.core.ids import new_epoch
from cluster.program import ProgramContext
from cluster.rpc import RpcServer, make_server, service
from cluster.stubs import inference_pb2, inference_pb2_grpc
from cluster.worker import model_folder
from router.dispatcher import DispatcherCore
from router.front.auth import Gate
from router.front.door import FrontDoor
from router.front.grpc_service import InferenceService
from router.front.http_app import make_app
from router.front.http_protocol import BoundedHeads
from router.front.metrics import FrontMetrics
from router.front.model_text import load_model_text
from router.permits import Permits
from router.runtime import RouterRuntime
from router.shared_quotas import open_shared_quotas
from router.tenants import Tenants
from router.workers_file import WorkersFile

LINGER_S = 0.3  # who asks on an open connection as we leave is told to ask elsewhere; then idle ones are closed
CUT_S = 2.0  # for streams past the bound to be told that they are cut
HEALTH_S = 0.2
_log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the program decides when to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop_listening(self) -> None:
        """Take no new connections; those there are go on until `should_exit`."""
        for server in self.servers:
            server.close()

    async def serve_on(self, sockets: list[socket.socket]) -> None:
        """Serve `sockets` until `should_exit` is set, then let running answers end within the grace time."""
        await self._serve(sockets)


def _bind(settings: RouterSettings) -> list[socket.socket]:
    """Listening sockets for HTTP; the first is this router's alone. Raises ConfigError naming a key that cannot be."""
    if not settings.share_ports:
        return [_listen(settings.host, settings.http_port, shared=False)]
    return [_listen(settings.host, 0, shared=False), _listen(settings.host, settings.http_port, shared=True)]


def _listen(host: str, port: int, *, shared: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        address = f"{host}:{port}"
        raise ConfigError(f"router.http_port: cannot listen on {address}: {error.strerror}; choose another") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock


async def _assemble(context: ProgramContext, epoch: int) -> tuple[RouterRuntime, FrontDoor]:
    """The dispatcher and the front door before it. Raises ModelError."""
    config, clock = context.config, SystemClock()
    folder = model_folder(config)
    text = await asyncio.to_thread(load_model_text, Path(folder) if folder else None, config.router.tool_format)
    gate = _gate(context, clock)
    core = DispatcherCore(config.router, config.timing, epoch, random.Random(), weights=gate.tenants.weights)
    runtime = RouterRuntime(core, clock, epoch=epoch, secret=context.secret)
    metrics = FrontMetrics(CollectorRegistry(), clock)
    return runtime, FrontDoor(config.router, config.model_name, text, runtime, clock, metrics, gate)


def _gate(context: ProgramContext, clock: Clock) -> Gate:
    """Tenants and their limits: shared between routers where there is a Redis, else this router's own."""
    config = context.config
    shared = open_shared_quotas(config) if config.tenants else None
    permits = Permits(clock, shared, fail_closed=config.store.fail_closed)
    return Gate(Tenants(config.tenants, context.secret), permits)


async def serve(context: ProgramContext) -> None:
    """Run one life of a router until `context.stopping`. Raises ConfigError, ModelError."""
    config, epoch = context.config, new_epoch()
    runtime, front = await _assemble(context, epoch)
    inference = service(
        inference_pb2.DESCRIPTOR,
        "Inference",
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceService(front),
    )
    allows = front.gate.allows if front.gate.tenants.configured else None
    own, shared = (0, config.router.grpc_port) if config.router.share_ports else (config.router.grpc_port, None)
    rpc = make_server(config.router.host, own, [inference], None, allows=allows, shared_port=shared)
    sockets = _bind(config.router)
    http = _HttpServer(
        uvicorn.Config(
            make_app(front, runtime),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(config.timing.drain_s + CUT_S),
            http=BoundedHeads,
            server_header=False,
            proxy_headers=False,  # nobody here asks who the client is
        )
    )
    await rpc.start()
    serving: asyncio.Future[None] = asyncio.ensure_future(runtime.serve())
    members = asyncio.ensure_future(_follow_members(context, runtime))
    health = asyncio.ensure_future(_tell_health(front, rpc))
    web = asyncio.ensure_future(http.serve_on(sockets))
    told = asyncio.ensure_future(_set(context.stopping))
    permits = asyncio.ensure_future(front.gate.permits.serve())
    working = (serving, members, health, web, told, permits)
    try:
        await http.listening.wait()
        host, port = sockets[0].getsockname()[:2]
        context.report_ready(address=rpc.address, epoch=epoch, http=f"http://{host}:{port}")
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()
        front.draining = True
        http.stop_listening()
        await rpc.set_serving(False)
        await asyncio.sleep(LINGER_S)
        http.should_exit = True
        doors = asyncio.gather(web, rpc.stop(config.timing.drain_s + CUT_S))
        await _drain(doors, serving, config.timing.drain_s)
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await rpc.stop(0)
        await front.text.grammars.close()


async def _drain(doors: asyncio.Future[Any], serving: asyncio.Future[None], drain_s: float) -> None:
    """Both doors are closing: wait until the last stream has ended. Those past the bound end with an error (I4)."""
    await asyncio.wait({doors}, timeout=drain_s)
    if not doors.done():
        _log.warning("cutting what still runs after %g s", drain_s)
        serving.cancel()
    await doors


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _follow_members(context: ProgramContext, runtime: RouterRuntime) -> None:
    """Workers come from the supervisor's list and from the configured seeds.

    The list is empty until somebody has told it: a supervisor without a controller cannot, nor is there always a
    supervisor. Then those last heard of are tried.
    """
    file = WorkersFile(context.config.router.workers_file)
    async for members in context.members.updates():
        workers = [m.address for m in members if m.role != "router"]
        file.keep(workers)
        runtime.set_members([*context.config.seeds, *(workers if members else file.load())])


async def _tell_health(front: FrontDoor, rpc: RpcServer) -> None:
    """gRPC health says SERVING exactly while a request would be taken: the same truth as /ready."""
    told = False
    while True:
        if (ready := not front.not_ready_reasons()) != told:
            told = ready
            await rpc.set_serving(ready)
        await asyncio.sleep(HEALTH_S)
