"""The one gRPC server and client of every program: explicit bind, credentials, limits, health and reflection.

    watch = service(watch_pb2.DESCRIPTOR, "Watch", add_WatchServicer_to_server, mine)
    server = make_server("127.0.0.1", 0, [watch], secret)
    await server.start()               # server.address is what to advertise
    stub = WatchStub(channel(address)); stub.Open(request, metadata=auth_metadata(secret))

With a secret every call needs `authorization: Bearer <secret>` except health checks; reflection needs it too (default
deny, FAULTS S04). Without one (the router's public API) everything is open, or `allows` says what it takes instead.
"""

from __future__ import annotations  # grpc's type stubs are generic where its classes are not

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.core.errors import ConfigError
from cluster.secret import same_secret

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_OPEN_TO_ALL = f"/{health.SERVICE_NAME}/"
_BEARER = "Bearer "
_SERVER_STREAMS = 256

_KEEPALIVE = (
    # A frozen or unplugged peer is noticed here at the latest; the application's own heartbeats are faster.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it gRPC waits a minute for the answer (measured: 68 s in all)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_SERVER_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", _SERVER_STREAMS),
    ("grpc.max_metadata_size", 16 * 1024),
)
# Peers with the secret may ping as they like: pings that waited for a busy process arrive together, and are no attack.
_TRUSTING = (("grpc.http2.max_ping_strikes", 0),)
_CLIENT_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.enable_http_proxy", 0),  # a proxy set for the web must not see cluster traffic
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Servicer = TypeVar("Servicer")
Metadata = tuple[tuple[str, str], ...]
Allows = Callable[[str | None], bool]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer, ready to be added to a server under its full name."""

    name: str
    add_to: Callable[[grpc.aio.Server], None]


def service(
    file: FileDescriptor, name: str, add: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer
) -> Service:
    """`service(watch_pb2.DESCRIPTOR, "Watch", add_WatchServicer_to_server, servicer)`."""
    return Service(file.services_by_name[name].full_name, lambda server: add(servicer, server))


class _Health(Protocol):
    """What we use of grpc_health's asyncio servicer, which its type stubs leave out."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None: ...

    async def enter_graceful_shutdown(self) -> None: ...


class RpcServer:
    """A bound, not yet started server. `port` is the real one; `address` is `host:port` as peers should dial it."""

    def __init__(self, server: grpc.aio.Server, checks: _Health, services: Sequence[str], host: str, port: int) -> None:
        self._server = server
        self._health = checks
        self._checked = ("", *services)
        self.port = port
        self.address = _join(host, port)

    async def start(self) -> None:
        """Accept calls. Health says NOT_SERVING until `set_serving(True)`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the server as a whole and for each service by its full name."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._checked:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def make_server(
    host: str,
    port: int,
    services: Iterable[Service],
    secret: str | None,
    *,
    allows: Allows | None = None,
    shared_port: int | None = None,
) -> RpcServer:
    """A server bound to one interface; port 0 takes a free one. `shared_port`: it listens there too, with others.

    `secret` None makes it public; then `allows` is asked with each call's `authorization` (None: not exactly one), if
    it is given. Raises ConfigError when the address cannot be bound. Must be called inside the running event loop.
    """
    interceptors = []
    if secret is not None:
        interceptors.append(_Authenticate(lambda given: _is_secret(given, secret), "the cluster secret"))
    elif allows is not None:
        interceptors.append(_Authenticate(allows, "an API key"))
    # Two servers on one port would share its calls without a word (FAULTS O04), where that is not asked for.
    public = (*_SERVER_OPTIONS, ("grpc.so_reuseport", int(shared_port is not None)))
    options = public if secret is None else (*public, *_TRUSTING)
    server = grpc.aio.server(interceptors=interceptors, options=options)
    checks: _Health = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = []
    for each in services:
        each.add_to(server)
        names.append(each.name)
    reflection.enable_server_reflection([health.SERVICE_NAME, reflection.SERVICE_NAME, *names], server)
    if shared_port is not None:
        _bind(server, host, shared_port)
    return RpcServer(server, checks, names, host, _bind(server, host, port))


def channel(address: str) -> grpc.aio.Channel:
    """A plain-text channel to `host:port`, with its own connection, limits, keepalive and quick reconnects."""
    return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)


def auth_metadata(secret: str) -> Metadata:
    """The metadata every internal call carries; and a tenant's call, with its key."""
    return (("authorization", _BEARER + secret),)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        bound = server.add_insecure_port(_join(host, port))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {_join(host, port)}: {error}; is another program using it?") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {_join(host, port)}; is another program using it?")
    return bound


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class _Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Turns away every call without what it `needs`, before a byte of its message is read."""

    def __init__(self, allows: Allows, needs: str) -> None:
        self._allows = allows
        self._needs = needs

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[bytes, bytes]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method
        given = authorization_of(handler_call_details.invocation_metadata)
        if method.startswith(_OPEN_TO_ALL) or self._allows(given):
            return await continuation(handler_call_details)
        _log.warning("refused a call without %s: %s", self._needs, method[:200])
        # Streaming on both sides fits every kind of call: nothing is read before the answer.
        return grpc.stream_stream_rpc_method_handler(self._deny)

    async def _deny(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"this call needs {self._needs}")
        raise AssertionError("abort always raises")


def authorization_of(metadata: grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None) -> str | None:
    """The one `authorization` of a call; None when there is none, or more than one."""
    given = [value for key, value in metadata or () if key == "authorization"]
    return given[0] if len(given) == 1 and isinstance(given[0], str) else None


def _is_secret(given: str | None, secret: str) -> bool:
    return given is not None and given.startswith(_BEARER) and same_secret(given[len(_BEARER) :], secret)
