"""A listening socket whose connections speak TLS, counted from when they are accepted.

asyncio's own server tells a protocol of a connection once its handshake is done. Before that nobody would count it, and
who says nothing would be waited for a minute. So here a connection is accepted, counted, and given HANDSHAKE_S for its
handshake; where no place is left it is hung up on at once. A few more than there are places get through theirs, only to
be told so (front/http_protocol.py): without one there is nothing to tell them in.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sized

HANDSHAKE_S = 10.0
GOODBYE_S = 5.0  # for the other side's part of the end of a connection
TOLD = 8
_AT_ONCE = 128  # accepted before others get a turn
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_REST_S = 1.0  # until there may be room again


class TlsListener:
    """Accepts at once. `served`: the connections that are through their handshake; `places`: for those and others."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        served: Sized,
        places: int,
    ) -> None:
        """Must be called inside the running event loop."""
        self._sock, self._context, self._protocol = sock, context, protocol
        self._served, self._places = served, places + TOLD
        self._shaking: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def connections(self) -> int:
        """All that are open, whether their handshake is done or not."""
        return len(self._served) + len(self._shaking)

    def close(self) -> None:
        """Take no new connections; handshakes go on."""
        if self._sock.fileno() < 0:
            return
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    async def wait_closed(self) -> None:
        """End the handshakes that still go on."""
        for task in self._shaking:
            task.cancel()
        await asyncio.gather(*self._shaking, return_exceptions=True)

    def _listen(self) -> None:
        self._rest = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._loop.remove_reader(self._sock)  # it would stay readable, and take all our time
                self._rest = self._loop.call_later(_REST_S, self._listen)
                return
            if self.connections >= self._places:
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._shake_hands(connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        """The protocol hears of the connection when it is done; of one that fails nobody does."""
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except OSError:  # ssl.SSLError is one
            connection.close()
