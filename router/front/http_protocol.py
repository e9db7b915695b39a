"""uvicorn's HTTP protocol on httptools, with the bounds on connections and heads that it does not have itself.

Who offers another protocol (`Upgrade: h2c`, as Java's own client does with every request) goes on in this one, as HTTP
allows; httptools would take the body of such a request for bytes of that other protocol.
A head ends within MAX_HEAD_BYTES and HEAD_S, or its connection does; beyond `max_connections` who comes is told 503 and
hung up on. Bodies are bounded where they are read (http_body.py), answers where they are written (door.py), connections
without a request by uvicorn's keep-alive.
"""

import asyncio
import re
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.core.errors import Unavailable
from router.front.errors_http import error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 20.0
_OFFER = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and hangs up when MAX_HEAD_BYTES came (and one more read at most) and the headers have not ended."""

    max_connections: ClassVar[int] = 10_000
    _in_head = True
    _head_bytes = 0
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
            data = _without_offers(data)
        if self.parser is None or self.transport.is_closing():  # one that was turned away
            return
        super().data_received(data)
        if not self._in_head or self._head_bytes == 0:
            return
        self._wait_for_head()
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

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


def _without_offers(data: bytes) -> bytes:
    """The bytes of a head, and perhaps of what follows; other protocols are offered under a name that means nothing."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _OFFER.search(data, 0, end) is None:  # nearly all of them, bodies and all
        return data
    return _OFFER.sub(b"x-upgrade", data[:end]) + data[end:]


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
