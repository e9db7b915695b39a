"""Reading a request body that may be too large, from a client that may leave."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive, Scope

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from router.front.metrics import ClientGone

T = TypeVar("T")
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


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work`, cancel it and raise ClientGone when the client disconnects (FAULTS R13). The body must be read."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
