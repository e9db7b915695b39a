"""uvicorn's HTTP protocol on httptools, with the bounds on connections and heads that it does not have itself.

Who offers another protocol (`Upgrade: h2c`, as Java's own client does with every request) goes on in this one, as HTTP
allows; httptools would take the body of such a request for bytes of that other protocol. So such an offer is given to
it under another name, wherever in a read, or across two, it is: the parser itself says whether it is in a head there.
A head ends within MAX_HEAD_BYTES and HEAD_S, or its connection does; beyond `max_connections` who comes is told 503 and
hung up on. Bodies are bounded where they are read (http_body.py), answers where they are written (door.py), connections
without a request by uvicorn's keep-alive.
"""

import asyncio
import re
import weakref
from collections.abc import MutableMapping
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.core.errors import Unavailable
from router.front.errors_http import error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 20.0
_OFFER = re.compile(rb"\nupgrade:", re.IGNORECASE)  # nothing may stand before the colon
_LONGEST = len(b"\nupgrade")
_RENAMED = b"-offered"  # what is added to the name: then it means nothing
PIECES = "headrace.pieces"
"""Where in a request's scope its Pieces are. Another server has none."""


class Pieces:
    """The pieces of one streamed body, given to the socket without a coroutine for each: half of what one costs.

    For pieces between ASGI's messages: the first and the last one are the server's own business.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # it has the scope, and the scope has this

    def ready(self) -> bool:
        """Whether the head has been written and the client is there and reads: nothing has to be waited for."""
        cycle = self._cycle()
        if cycle is None or not cycle.chunked_encoding or cycle.response_complete:
            return False
        return not cycle.disconnected and not cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """One that is not empty, which would be the end; only while it is ready."""
        cycle = self._cycle()
        if cycle is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and hangs up when MAX_HEAD_BYTES came (and one more read at most) and the headers have not ended."""

    max_connections: ClassVar[int] = 10_000
    _in_head = True
    _head_bytes = 0
    _before = b""  # as much of the last reads as an offer may have begun in
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        if self.parser is None or self.transport.is_closing():  # one that was turned away
            return
        self._feed(data)
        if not self._in_head or self._head_bytes == 0:
            return
        self._wait_for_head()
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def _feed(self, data: bytes) -> None:
        """Read by read as it comes, but in pieces where something looks like an offer: it is one in a head only."""
        fed = 0
        for colon in _offers(self._before, data):
            super().data_received(data[fed:colon])
            fed = colon
            if self.transport.is_closing():
                return
            if self._in_head:
                super().data_received(_RENAMED)
        self._before = (self._before + data[-_LONGEST:])[-_LONGEST:]
        super().data_received(data[fed:] if fed else data)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # no WebSocket was asked for
            cast("MutableMapping[str, object]", self.scope)[PIECES] = Pieces(self.cycle)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """No answer: who needs this long for a head does not wait for one. Not while an earlier answer is written."""
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._wait_for_head()


def _offers(before: bytes, data: bytes) -> list[int]:
    """Where in `data`, which came after `before`, there is the colon after the name of a header with an offer."""
    across = (each.end() - 1 - len(before) for each in _OFFER.finditer(before + data[:_LONGEST]))
    return sorted({at for at in across if at >= 0} | {each.end() - 1 for each in _OFFER.finditer(data)})


def bounded(max_connections: int) -> type[BoundedHttp]:
    """For uvicorn, which makes one for each connection."""
    return type("BoundedHttp", (BoundedHttp,), {"max_connections": max_connections})


def _full() -> bytes:
    body = error_body(Unavailable("too many connections are open here; another router may have room"))
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        "retry-after: 1",
        "connection: close",
    )
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


_FULL = _full()
