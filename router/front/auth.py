"""Every call needs a key, unless no tenant is configured: decided before any route is looked up (FAULTS S04).

Default deny: what is open is a list of whole paths, compared as they will be routed; no prefix, no pattern, so a path
that is written in some other way is not on it. A route added anywhere needs a key without a word about it. The tenant
travels in the ASGI scope (`tenant_of`). gRPC does the same in its interceptor (`Gate.allows`); there health is open.

Routes that show the whole cluster (`only_operators`) need a key of a tenant that is an operator; others get 403.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.core.clock import Clock, SystemClock
from cluster.core.config import UsageSettings
from cluster.core.errors import Forbidden, Unauthenticated
from cluster.core.ids import new_epoch
from cluster.usage import LocalUsage, day_of
from router.front.dashboard.paths import FILES
from router.front.errors_http import error_body, error_headers, status_of
from router.ledger import Ledger
from router.permits import Permits
from router.tenants import Tenant, Tenants

OPEN = frozenset({"/live", "/ready", "/health", *FILES})
"""Probes have no key; /health is /ready by another name. /metrics needs one: it tells every tenant's numbers. The
dashboard's files are the same for everybody, and ask for a key to show anything; no browser can send one with them."""

_TENANT = "headrace.tenant"


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may come in, how many at a time, and what they used. By default everybody may."""

    tenants: Tenants = field(default_factory=lambda: Tenants({}, None))
    permits: Permits = field(default_factory=lambda: Permits(SystemClock()))
    usage: UsageSettings = field(default_factory=UsageSettings)
    ledger: Ledger = field(default_factory=lambda: local_ledger(SystemClock()))

    def allows(self, authorization: str | None) -> bool:
        """Whether a call with this `authorization` is anybody's."""
        try:
            self.tenants.authenticate(authorization)
        except Unauthenticated:
            return False
        return True


def local_ledger(clock: Clock) -> Ledger:
    """One whose book ends with this process."""
    return Ledger(clock, LocalUsage(lambda: day_of(clock.wall())), epoch=new_epoch())


class Authenticate:
    """Before an ASGI app: 401 in OpenAI's shape, and nothing of the request was read."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._tenants = gate.tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            scope[_TENANT] = self._tenants.authenticate(_authorization(scope.get("headers", ())))
        except Unauthenticated as error:
            await _refuse(scope, send, error)
            return
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """The tenant that this request is from. Behind `Authenticate` there always is one, except on open paths."""
    tenant = scope[_TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def only_operators(scope: Scope) -> None:
    """Raises Forbidden for tenants that may not look at the whole cluster."""
    if not tenant_of(scope).operator:
        raise Forbidden("this needs the key of an operator", code="insufficient_permissions")


def _authorization(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    given = [value for name, value in headers if name == b"authorization"]
    return given[0].decode("latin-1") if len(given) == 1 else None


async def _refuse(scope: Scope, send: Send, error: Unauthenticated) -> None:
    if scope["type"] != "http":  # a WebSocket: closed before it is accepted, which servers answer with 403
        await send({"type": "websocket.close", "code": 1008})
        return
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status_of(error), "headers": encoded})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
