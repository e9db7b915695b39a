"""Reading a request body that may be too large, from a client that may leave."""

import asyncio
from types import TracebackType

from starlette.types import Receive, Scope

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from router.front.metrics import ClientGone

_BODY_S = 60.0  # in which a body must have come

# An answer sent while a client still writes is often lost to a connection reset, so what is too much is read and
# thrown away, up to here.
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024


class BodyTooLarge(InvalidRequest):
    """More than the configured max_body_bytes."""

    status = 413


class WrongMediaType(InvalidRequest):
    """A body that says it is no JSON. Browsers send such bodies to any address without asking (no CORS preflight)."""

    status = 415


class BodyTooSlow(InvalidRequest):
    """A body that does not come to an end in time."""

    status = 408


def _check_media_type(scope: Scope) -> None:
    """Raises WrongMediaType; a body without content-type is taken for JSON."""
    given = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    media_type = given.partition(b";")[0].strip().lower()
    if media_type not in (b"", b"application/json"):
        raise WrongMediaType("content-type must be application/json", code="unsupported_media_type")


async def read_json(scope: Scope, receive: Receive, settings: RouterSettings) -> bytes:
    """The body of a request that should be JSON.

    Raises BodyTooLarge, BodyTooSlow (nobody may hold a handler open for ever), WrongMediaType, ClientGone.
    """
    seconds = min(_BODY_S, settings.deadline_s)
    try:
        async with asyncio.timeout(seconds):
            body = await read_body(scope, receive, settings.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not end within {seconds:g} s", code="body_too_slow") from None
    _check_media_type(scope)
    return body


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, with or without content-length; holds at most `limit` bytes. Raises BodyTooLarge, ClientGone."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    too_large = declared.isdigit() and int(declared) > limit
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if too_large or size > limit:
            too_large = True
            chunks.clear()
        else:
            chunks.append(chunk)
        if not message.get("more_body", False) or size > _MAX_DISCARDED_BYTES:
            break
    if too_large:
        raise BodyTooLarge(f"the body is larger than {limit} bytes", code="body_too_large")
    return b"".join(chunks)


class WhileConnected:
    """`async with WhileConnected(receive)`: what is inside is cancelled when the client disconnects (FAULTS R13).

    Raises ClientGone then. The body must be read. Works as asyncio.timeout does, with a disconnect for the clock.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be cancelled")
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        del self._watcher  # its end has this object in its traceback: a cycle, which only the collector would free
        if self._gone and self._task.uncancel() <= self._cancelling and kind is not None:
            raise ClientGone from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone = True
        self._task.cancel()
