"""POST /admin/drain and /admin/scale: an operator's hand on the pools. The router passes the wish on (cluster/pipe.py).

1. who asks is an operator; where nobody has a key, somebody on this machine, who asks for it by a name of this machine:
   a page from elsewhere whose name was made to point here is somebody else
2. it is no form or link of another page: the header `x-headrace-action` makes browsers ask first, and no answer allows
3. the body is one small, valid wish
4. it is passed on, and told of in the log; what takes longer than ANSWER_S is 202: the page shows the rest
"""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive, Scope

from cluster.core.config import RouterSettings
from cluster.core.errors import Forbidden, InvalidRequest
from cluster.pipe import Drain, Scale, Wish
from router.front.auth import only_operators, tenant_of
from router.front.http_body import read_json
from router.front.openai_shapes import Json

ANSWER_S = 2.0
HEADER = b"x-headrace-action"
MOST_WORKERS = 1024  # of a pool, as `pools.*.replicas`
_MAX_BODY = 4096
_log = logging.getLogger(__name__)

Fulfil = Callable[[Wish], Awaitable[str | None]]


class Refused(InvalidRequest):
    """The cluster could not do it, and says why."""

    status = 409


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises InvalidRequest, naming the field."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or None
            raise InvalidRequest(f"{where or 'the body'}: {first['msg']}", param=where) from None


class DrainBody(_Body):
    """A worker: routers are drained from outside, for who drains the one that answers hears no answer."""

    program: Annotated[str, Field(pattern=r"^(prefill|decode)-[0-9]{1,6}$")]

    def wish(self) -> Wish:
        return Drain(self.program)


class ScaleBody(_Body):
    pool: Literal["prefill", "decode"]
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)]

    def wish(self) -> Wish:
        return Scale(self.pool, self.workers)


class Actions:
    """`fulfil` has the cluster do it. `keyless`: whether calls need no key now."""

    def __init__(self, settings: RouterSettings, fulfil: Fulfil, keyless: Callable[[], bool]) -> None:
        self._settings = settings.model_copy(update={"max_body_bytes": _MAX_BODY})
        self._fulfil = fulfil
        self._keyless = keyless
        self._doing: set[asyncio.Task[str | None]] = set()

    async def act(self, scope: Scope, receive: Receive, body: type[DrainBody] | type[ScaleBody]) -> tuple[int, Json]:
        """Status and answer. Raises Forbidden, InvalidRequest, Unavailable."""
        self._check(scope)
        wish = body.parse(await read_json(scope, receive, self._settings)).wish()
        _log.warning("%s asks for %s", f"operator {tenant_of(scope).name}" if not self._keyless() else "somebody", wish)
        doing = asyncio.ensure_future(self._fulfil(wish))
        self._doing.add(doing)
        doing.add_done_callback(self._done)
        done, _ = await asyncio.wait([doing], timeout=ANSWER_S)
        if not done:
            return 202, {"done": False}
        if (problem := doing.result()) is not None:
            raise Refused(problem, code="refused")
        return 200, {"done": True}

    def _done(self, doing: "asyncio.Task[str | None]") -> None:
        self._doing.discard(doing)
        if not doing.cancelled() and (error := doing.exception() or doing.result()):
            _log.warning("that could not be done: %s", error)

    def _check(self, scope: Scope) -> None:
        only_operators(scope)
        headers = dict(scope["headers"])
        if HEADER not in headers:
            raise InvalidRequest("an action needs the header x-headrace-action", code="not_an_action")
        if self._keyless() and not (_local(scope) and _named_locally(headers.get(b"host", b""))):
            raise Forbidden(
                "without tenants, actions are taken from this machine alone; configure a tenant with `operator: true`",
                code="insufficient_permissions",
            )


def _local(scope: Scope) -> bool:
    """Whether the connection comes from this machine."""
    client = scope.get("client")
    return client is not None and _loopback(client[0])


def _named_locally(host: bytes) -> bool:
    """Whether the address that was asked is a loopback address, or localhost: no name that anybody can make."""
    try:
        name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _loopback(name)


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
