"""The HTTP listeners of a router: one for clients, and one of its own for who looks after the cluster and for probes.

Both serve the same app, behind the same keys; each has its own part of the routes (FAULTS S05, P09). A flood of clients
takes no place at the other one.
"""

import asyncio
import functools
import math
import socket
import ssl
from collections.abc import Sequence
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.core.config import RouterSettings
from cluster.core.errors import ConfigError
from cluster.tls import CertificateFiles, web_context
from router.front.auth import OPEN
from router.front.dashboard.paths import ALL as DASHBOARD
from router.front.http_protocol import bounded
from router.tls_listener import TlsListener

ADMIN = frozenset({"/metrics", "/status", "/usage"}) | DASHBOARD
"""Everybody's numbers, and what operators do about them; of /usage a tenant is told its own."""

_RECENT = "/debug/requests/"  # tenants see their own at the clients' listener


class ClientRoutes:
    """The app without what is for operators: a path of theirs becomes one that is not there, behind the same keys.

    So does one with a line break or the like in it: a route's pattern also matches before a break at the end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path in ADMIN or not path.isprintable():
            scope = _elsewhere(scope, "router.admin_port")
        await self._app(scope, receive, send)


class AdminRoutes:
    """The app without what is for clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = path in ADMIN or path in OPEN or path.startswith(_RECENT)
        if not ours or not path.isprintable():
            scope = _elsewhere(scope, "router.http_port")
        await self._app(scope, receive, send)


def _elsewhere(scope: Scope, port: str) -> Scope:
    """Nothing is routed there, and the 404 says why."""
    return {**scope, "path": f"{scope.get('path', '')}-is-on-{port}"}


class WebServer(uvicorn.Server):
    """uvicorn, without signal handlers of its own: the program decides when to stop."""

    def __init__(
        self,
        app: ASGIApp,
        listening: Sequence[socket.socket],
        *,
        tls: CertificateFiles | None,
        drain_s: float,
        max_connections: int,
    ) -> None:
        """`listening`: see `listen`; the first is its own. Answers that run get `drain_s` seconds when it stops."""
        config = uvicorn.Config(
            app,
            log_config=None,  # its own would show whole tracebacks, beside our log
            log_level="warning",
            access_log=False,
            lifespan="off",
            interface="asgi3",
            timeout_graceful_shutdown=math.ceil(drain_s),
            http=bounded(max_connections),
            server_header=False,
            proxy_headers=False,  # nobody here asks who the client is
            ssl_context_factory=None if tls is None else lambda *_: web_context(tls),
        )
        super().__init__(config)
        self.listening = asyncio.Event()
        self._sockets, self._max_connections = list(listening), max_connections
        host, port = self._sockets[0].getsockname()[:2]
        self.url = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (context := self.config.ssl) is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            listeners = [self._encrypted(sock, context) for sock in self._sockets]
            self.servers = cast("list[asyncio.Server]", listeners)  # uvicorn closes them, and waits for that
        self.listening.set()

    def _encrypted(self, sock: socket.socket, context: ssl.SSLContext) -> TlsListener:
        state = self.server_state
        http = functools.partial(bounded(self._max_connections), self.config, state, self.lifespan.state)
        return TlsListener(sock, context, http, state.connections, self._max_connections)

    def stop_listening(self) -> None:
        """Take no new connections; those there are go on until `should_exit`."""
        for server in self.servers:
            server.close()

    async def run_here(self) -> None:
        """Serve until `should_exit` is set, then let running answers end within the grace time."""
        await self._serve(self._sockets)


def sockets(settings: RouterSettings) -> list[socket.socket]:
    """Listening sockets for clients; the first is this router's alone. Raises ConfigError naming a key."""
    key = "router.http_port"
    if not settings.share_ports:
        return [listen(settings.host, settings.http_port, key)]
    return [listen(settings.host, 0, key), listen(settings.host, settings.http_port, key, shared=True)]


def listen(host: str, port: int, key: str, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError, naming `key`, when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock
