"""The one gRPC server and client of every program: explicit bind, credentials, limits, health and reflection.

    watch = service(watch_pb2.DESCRIPTOR, "Watch", add_WatchServicer_to_server, mine)
    server = make_server("127.0.0.1", 0, [watch], credentials)
    await server.start()               # server.address is what to advertise
    proof = credentials.proof(address)
    call = WatchStub(channel(address, credentials.tls)).Open(request, metadata=proof_metadata(proof))
    await check_answer(call, proof)    # only now is it known who answers

With credentials every call needs a proof (credentials.py) except one health check; health's Watch and reflection
need it too (default deny, FAULTS S04). At the router's public door `allows` says what it takes instead, if anything.
Who opens a call and does not send its message is not waited for: streams that strangers hold open would cost memory
without end.
"""

from __future__ import annotations  # grpc's type stubs are generic where its classes are not

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.core.errors import ConfigError
from cluster.credentials import Credentials, Proof
from cluster.tls import CertificateFiles, ClientTls, rpc_server_credentials

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_OPEN_TO_ALL = f"/{health.SERVICE_NAME}/Check"
_BEARER = "Bearer "
_PROOF, _ANSWER = "headrace-proof", "headrace-answer"
_REFUSAL_S = 1.0  # for the rest of a refusal to come
_TELL_S = 1.0  # from one refusal in the log to the next
_CHECK_S = 5.0  # for the message of a health check to come
_SERVER_STREAMS = 256

_KEEPALIVE = (
    # A frozen or unplugged peer is noticed here at the latest; the application's own heartbeats are faster.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it gRPC waits a minute for the answer (measured: 68 s in all)
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_RECEIVE = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)
_SEND = ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)
# Two servers on one port would share its calls without a word (FAULTS O04), where that is not asked for.
_ALONE = ("grpc.so_reuseport", 0)
_IDLE_MS = 600_000  # a client without a call connects again when it has one
_SERVER_OPTIONS = (
    _SEND,
    *_KEEPALIVE,
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", _SERVER_STREAMS),
    ("grpc.max_metadata_size", 16 * 1024),
)
# Peers with the secret may ping as they like: pings that waited for a busy process arrive together, and are no attack.
_TRUSTING: tuple[tuple[str, int], ...] = (_RECEIVE, _ALONE, ("grpc.http2.max_ping_strikes", 0))
_CLIENT_OPTIONS = (
    _RECEIVE,
    _SEND,
    *_KEEPALIVE,
    ("grpc.enable_http_proxy", 0),  # a proxy set for the web must not see cluster traffic
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time in which a connection must come about: a frozen peer is noticed, a busy one has a chance.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Servicer = TypeVar("Servicer")
Metadata = tuple[tuple[str, str], ...]
Allows = Callable[[str | None], bool]
_Given = grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None
_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[bytes, bytes]


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


@dataclass(frozen=True, slots=True)
class PublicDoor:
    """A server for clients, not for members. `allows`: asked with each call's `authorization` (None: not exactly one).

    `tls`: its certificates. None: open, and plain. `shared_port`: it listens there too, with others.
    """

    allows: Allows | None = None
    tls: CertificateFiles | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_connections: int = 10_000
    message_s: float = 60.0  # in which a call's message must have come, as a body over HTTP
    shared_port: int | None = None

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        return (
            ("grpc.so_reuseport", int(self.shared_port is not None)),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        )


def make_server(host: str, port: int, services: Iterable[Service], door: Credentials | PublicDoor) -> RpcServer:
    """A server bound to one interface; port 0 takes a free one. `door`: for members of the cluster, or for clients.

    Raises ConfigError when the address cannot be bound. Must be called inside the running event loop.
    """
    members = None
    asks: _Authenticate
    if isinstance(door, Credentials):
        asks = members = _Members(door)
        options, tls, shared = _TRUSTING, None if door.tls is None else door.tls.files, None
    else:
        asks = _Clients(door)
        options, tls, shared = door.options, door.tls, door.shared_port
    server = grpc.aio.server(interceptors=[asks], options=(*_SERVER_OPTIONS, *options))
    checks: _Health = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = []
    for each in services:
        each.add_to(server)
        names.append(each.name)
    reflection.enable_server_reflection([health.SERVICE_NAME, reflection.SERVICE_NAME, *names], server)
    if shared is not None:
        _bind(server, host, shared, tls)
    bound = _bind(server, host, port, tls)
    if members is not None:
        members.port = bound
    return RpcServer(server, checks, names, host, bound)


def channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`: its own connection, limits, keepalive and quick reconnects. Plain without `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.aio.secure_channel(address, tls.credentials(), options=(*_CLIENT_OPTIONS, *name))


def proof_metadata(proof: Proof) -> Metadata:
    """The metadata of an internal call."""
    return ((_PROOF, proof.given),)


async def check_answer(call: grpc.aio.Call, proof: Proof) -> None:
    """Wait for the other side's first metadata. Raises ConnectionError, the call cancelled, unless it is a member's."""
    first = await call.initial_metadata()
    if proof.is_answered_by(_only(first, _ANSWER)):
        return
    reason = "who answers does not know the cluster's secret"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSAL_S):
            reason = f"{(await call.code()).name}: {await call.details()}"
    call.cancel()
    raise ConnectionError(reason)


def auth_metadata(key: str) -> Metadata:
    """The metadata of a tenant's call."""
    return (("authorization", _BEARER + key),)


def _bind(server: grpc.aio.Server, host: str, port: int, tls: CertificateFiles | None) -> int:
    try:
        if tls is None:
            bound = server.add_insecure_port(_join(host, port))
        else:
            bound = server.add_secure_port(_join(host, port), rpc_server_credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {_join(host, port)}: {error}; is another program using it?") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {_join(host, port)}; is another program using it?")
    return bound


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class _Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Turns away every call without what it `needs`, before a byte of its message is read."""

    needs = ""
    _told_at = -math.inf
    _untold = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[bytes, bytes]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method == _OPEN_TO_ALL:
            return _in_time(_CHECK_S, await continuation(handler_call_details))
        if (told := self.let_in(metadata)) is not None:
            return self.prepared(told, await continuation(handler_call_details))
        self._tell(method)
        # Streaming on both sides fits every kind of call: nothing is read before the answer.
        return grpc.stream_stream_rpc_method_handler(self._deny)

    def let_in(self, metadata: _Given) -> Metadata | None:
        """What the answer begins with; None refuses."""
        raise NotImplementedError

    def prepared(self, told: Metadata, handler: _Handler) -> _Handler:
        """The handler of a call that was let in."""
        raise NotImplementedError

    def _tell(self, method: str) -> None:
        """Once in a while: whoever is refused must not be able to fill a disk, nor to write a line of the log."""
        now = asyncio.get_running_loop().time()
        if now - self._told_at < _TELL_S:
            self._untold += 1
            return
        also = f", and {self._untold} before it" if self._untold else ""
        _log.warning("refused a call without %s: %.200r%s", self.needs, method, also)
        self._told_at, self._untold = now, 0

    async def _deny(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"this call needs {self.needs}")
        raise AssertionError("abort always raises")


class _Clients(_Authenticate):
    needs = "an API key"

    def __init__(self, door: PublicDoor) -> None:
        self._allows, self._message_s = door.allows, door.message_s

    def let_in(self, metadata: _Given) -> Metadata | None:
        return () if self._allows is None or self._allows(authorization_of(metadata)) else None

    def prepared(self, told: Metadata, handler: _Handler) -> _Handler:
        return _in_time(self._message_s, handler)


class _Members(_Authenticate):
    needs = "a proof of the cluster secret"

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.port = 0

    def let_in(self, metadata: _Given) -> Metadata | None:
        answer = self._credentials.check(_only(metadata, _PROOF), self.port)
        return None if answer is None else ((_ANSWER, answer),)

    def prepared(self, told: Metadata, handler: _Handler) -> _Handler:
        return _beginning_with(told, handler)


def _named(asks_much: bool, answers_much: bool) -> str:
    """What a handler calls its function for this kind of call."""
    return "_".join("stream" if streaming else "unary" for streaming in (asks_much, answers_much))


async def _answered(answer: Any, context: grpc.aio.ServicerContext[bytes, object]) -> object:
    """What a handler's function gave for a call: the one message, or the stream of them, which is written here."""
    if not inspect.isasyncgen(answer):
        return await answer
    async for message in answer:
        await context.write(message)
    return None


def _in_time(seconds: float, handler: _Handler) -> _Handler:
    """The same handler, whose one message must come within `seconds`; what is a stream of them stays as it is.

    gRPC would wait for ever before it calls the handler. On the wire one message and a stream of one are the same, so
    the call is taken for a stream, of which the first is read here.
    """
    if handler is None or handler.request_streaming:
        return handler
    inner: Callable[[Any, Any], Any] = getattr(handler, _named(False, handler.response_streaming))

    async def behave(messages: AsyncIterator[object], context: grpc.aio.ServicerContext[bytes, object]) -> object:
        try:
            async with asyncio.timeout(seconds):
                given = await anext(messages)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no message came within {seconds:g} s")
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no message came")
        return await _answered(inner(given, context), context)

    name = _named(True, handler.response_streaming)
    changed: _Handler = handler._replace(request_streaming=True, **{name: behave})  # type: ignore[attr-defined]
    return changed


def _beginning_with(told: Metadata, handler: _Handler) -> _Handler:
    """The same handler, whose answer has `told` as its first metadata, at once."""
    if handler is None:  # no such method, which the type stubs do not know of
        return handler
    name = _named(handler.request_streaming, handler.response_streaming)
    inner: Callable[[Any, Any], Any] = getattr(handler, name)

    async def behave(given: object, context: grpc.aio.ServicerContext[bytes, object]) -> object:
        await context.send_initial_metadata(told)
        return await _answered(inner(given, context), context)

    changed: _Handler = handler._replace(**{name: behave})  # type: ignore[attr-defined]
    return changed


def authorization_of(metadata: _Given) -> str | None:
    """The one `authorization` of a call; None when there is none, or more than one."""
    return _only(metadata, "authorization")


def _only(metadata: _Given, key: str) -> str | None:
    given = [value for name, value in metadata or () if name == key]
    return given[0] if len(given) == 1 and isinstance(given[0], str) else None
