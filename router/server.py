"""The router program: one dispatcher behind two doors, OpenAI HTTP and gRPC, and a third one for who looks after it.

1. load the tokenizer and the chat template; open the doors (not ready yet)
2. find workers: the supervisor's list, or the last one that was heard here; and `seeds:` of the configuration
3. serve until told to stop
4. drain: /ready and gRPC health say no, the listener closes, requests on open connections get 503 and Retry-After,
   running streams end within `timing.drain_s`

With `router.share_ports` the routers of a host listen on the same two ports: the kernel gives each connection to one of
them. Each is a whole router with its own books, and listens on ports of its own besides, which it reports: there
/ready and /debug speak of this one router, and on the shared port of whichever took the connection.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from cluster.core.addresses import reached_at
from cluster.core.clock import Clock, SystemClock
from cluster.core.config import ClusterConfig
from cluster.core.ids import new_epoch
from cluster.program import ProgramContext
from cluster.rpc import PublicDoor, RpcServer, make_server, service
from cluster.stubs import inference_pb2, inference_pb2_grpc
from cluster.tls import public_files
from cluster.usage import LocalUsage, day_of
from cluster.worker import model_folder
from router.dispatcher import DispatcherCore
from router.front.auth import Gate
from router.front.dashboard.routes import Dashboard
from router.front.door import FrontDoor
from router.front.grpc_service import InferenceService
from router.front.http_app import make_app
from router.front.metrics import FrontMetrics
from router.front.model_text import load_model_text
from router.front.recent import Recent
from router.front.tracing import open_tracing
from router.ledger import Ledger
from router.permits import Permits
from router.runtime import RouterRuntime
from router.shared_store import open_shared_quotas, open_shared_tenants, open_shared_usage
from router.tenant_sources import TenantSources
from router.tenants import Tenants
from router.web import AdminRoutes, ClientRoutes, WebServer, listen, sockets
from router.workers_file import WorkersFile

LINGER_S = 0.3  # who asks on an open connection as we leave is told to ask elsewhere; then idle ones are closed
CUT_S = 2.0  # for streams past the bound to be told that they are cut
HEALTH_S = 0.2
ADMIN_CONNECTIONS = 256
_log = logging.getLogger(__name__)


async def _assemble(
    context: ProgramContext, epoch: int, tenants: Tenants, make_metrics: type[FrontMetrics]
) -> tuple[RouterRuntime, FrontDoor]:
    """The dispatcher and the front door before it. Raises ModelError."""
    config, clock = context.config, SystemClock()
    folder = model_folder(config)
    text = await asyncio.to_thread(load_model_text, Path(folder) if folder else None, config.router.tool_format)
    gate = _gate(context, tenants, clock, epoch)
    core = DispatcherCore(config.router, config.timing, epoch, random.Random(), weights=gate.tenants.weights)
    runtime = RouterRuntime(core, clock, epoch=epoch, credentials=context.credentials)
    metrics = make_metrics(CollectorRegistry(), clock, Recent() if config.router.dashboard else None)
    front = FrontDoor(config.router, config.model_name, text, runtime, clock, metrics, gate)
    front.tracing = open_tracing(config.tracing, runtime, clock, context.name)
    return runtime, front


def _gate(context: ProgramContext, tenants: Tenants, clock: Clock, epoch: int) -> Gate:
    """Tenants, their limits and their usage: shared between routers where there is a Redis, else this router's own."""
    config = context.config
    shared = open_shared_quotas(config) if tenants.configured else None
    permits = Permits(clock, shared, fail_closed=config.store.fail_closed)
    book = open_shared_usage(config)
    own = LocalUsage(lambda: day_of(clock.wall()), config.usage.keep_days)
    ledger = Ledger(clock, book or own, epoch=epoch, shared=book is not None)
    return Gate(tenants, permits, config.usage, ledger)


async def serve(context: ProgramContext, make_metrics: type[FrontMetrics] = FrontMetrics) -> None:
    """Run one life of a router until `context.stopping`. Raises ConfigError, ModelError, StoreUnavailable."""
    config, epoch = context.config, new_epoch()
    tenants = TenantSources(config, context.secret, open_shared_tenants(config))
    await tenants.start()
    runtime, front = await _assemble(context, epoch, tenants.tenants, make_metrics)
    front.members = context.members
    dashboard = Dashboard(runtime, context.wishes.ask) if config.router.dashboard else None
    rpc, http, admin = doors(config, front, make_app(front, runtime, dashboard))
    await rpc.start()
    web = asyncio.ensure_future(http.run_here())
    looked_after = asyncio.ensure_future(admin.run_here())
    serving: asyncio.Future[None] = asyncio.ensure_future(runtime.serve())
    working = (
        web,
        looked_after,
        serving,
        asyncio.ensure_future(_follow_members(context, runtime)),
        asyncio.ensure_future(_tell_health(front, rpc)),
        asyncio.ensure_future(_set(context.stopping)),
        asyncio.ensure_future(front.gate.permits.serve()),
        asyncio.ensure_future(front.gate.ledger.serve()),
        asyncio.ensure_future(tenants.follow()),
    )
    try:
        await asyncio.gather(http.listening.wait(), admin.listening.wait())
        address, client_url, admin_url = (reached_at(each, config.host) for each in (rpc.address, http.url, admin.url))
        _keep_what_is_here()
        context.report_ready(address=address, epoch=epoch, http=client_url, admin=admin_url)
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()
        front.draining = True
        http.stop_listening()
        await rpc.set_serving(False)
        await asyncio.sleep(LINGER_S)
        http.should_exit = True
        closing = asyncio.gather(web, rpc.stop(config.timing.drain_s + CUT_S))
        await _drain(closing, serving, config.timing.drain_s)
        admin.should_exit = True
        await looked_after
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await rpc.stop(0)
        await front.text.grammars.close()
        if front.tracing is not None:
            await asyncio.to_thread(front.tracing.close)
        await tenants.close()


def doors(config: ClusterConfig, front: FrontDoor, app: ASGIApp) -> tuple[RpcServer, WebServer, WebServer]:
    """gRPC and HTTP for clients, and HTTP for who looks after the cluster; bound, not started. Raises ConfigError."""
    settings, keys = config.router, front.gate
    tls = public_files(config.tls.public)
    inference = service(
        inference_pb2.DESCRIPTOR,
        "Inference",
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceService(front),
    )
    allows = keys.allows if keys.tenants.configured else None
    own, shared = (0, settings.grpc_port) if settings.share_ports else (settings.grpc_port, None)
    door = PublicDoor(allows, tls, 4 * settings.max_body_bytes, settings.max_connections, shared_port=shared)
    rpc = make_server(settings.host, own, [inference], door)
    drain_s = config.timing.drain_s + CUT_S
    http = WebServer(
        ClientRoutes(app), sockets(settings), tls=tls, drain_s=drain_s, max_connections=settings.max_connections
    )
    # Probes and Prometheus have no certificates to show.
    unasked = public_files(config.tls.public.model_copy(update={"client_ca_file": None}))
    sock = listen(settings.admin_host, settings.admin_port, "router.admin_port")
    admin = WebServer(AdminRoutes(app), [sock], tls=unasked, drain_s=CUT_S, max_connections=ADMIN_CONNECTIONS)
    return rpc, http, admin


async def _drain(doors: asyncio.Future[Any], serving: asyncio.Future[None], drain_s: float) -> None:
    """Both doors are closing: wait until the last stream has ended. Those past the bound end with an error (I4)."""
    await asyncio.wait({doors}, timeout=drain_s)
    if not doors.done():
        _log.warning("cutting what still runs after %g s", drain_s)
        serving.cancel()
    await doors


def _keep_what_is_here() -> None:
    """What a router has by now it keeps: the garbage collector need not go through all of it again and again.

    Nor look for cycles after every 700 objects, when requests leave next to none. It was 11 % of a request's time, a
    third of it is left.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


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
