"""The engine socket: one server, one engine, typed messages both ways (messages in engine/messages.py).

On the wire a frame is a 4-byte little-endian length and that many bytes of msgpack; nothing else, never pickle. Both
ends check every message against its type, and refuse a frame longer than MAX_FRAME before reading it.

    server (asyncio)   EngineChannel   send(command), async for report in channel, close()
    engine (threads)   EnginePort      receive() -> command or None, send(report) from any thread, close()

Two implementations under one contract suite: a Unix socket (`SocketChannel`, `SocketPort`) and `memory_pair`, for
simulation and tests, which encodes and decodes the same bytes.
"""

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol, cast

import msgspec

from cluster.core.errors import HeadraceError
from engine.messages import Command, Report

MAX_FRAME = 16 * 1024 * 1024
_HEADER = struct.Struct("<I")


class ChannelError(HeadraceError):
    """The other end broke the protocol: a frame too long, or bytes that are no message."""


class ChannelClosed(HeadraceError):
    """Sending on a channel whose other end is gone, or which was closed here."""


class EngineChannel(Protocol):
    """The server's end. Iterating yields reports until the engine is gone; one reader at a time."""

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. Raises ChannelClosed, or ChannelError when it is longer than MAX_FRAME."""

    def __aiter__(self) -> AsyncIterator[Report]:
        """Reports in order. Ends when the engine has closed or died; raises ChannelError for a broken message."""

    def close(self) -> None:
        """Hang up; the engine leaves when it notices. Idempotent."""


class EnginePort(Protocol):
    """The engine's end."""

    def receive(self) -> Command | None:
        """The next command, waiting for it; None when the server is gone. Raises ChannelError. One thread only."""

    def send(self, report: Report) -> None:
        """Send, from any thread. Raises ChannelClosed, or ChannelError when it is longer than MAX_FRAME."""

    def close(self) -> None:
        """Hang up. Idempotent; wakes a thread in `receive`."""


class Codec:
    """Typed msgpack for one direction. Not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._commands = msgspec.msgpack.Decoder(Command)
        self._reports = msgspec.msgpack.Decoder(Report)

    def encode(self, message: Command | Report) -> bytes:
        """One frame, header included. Raises ChannelError when the message is longer than MAX_FRAME."""
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME:
            raise ChannelError(f"a {type(message).__name__} of {len(body)} bytes is longer than {MAX_FRAME}")
        return _HEADER.pack(len(body)) + body

    def command(self, body: bytes | memoryview) -> Command:
        """Raises ChannelError for anything that is not a command."""
        try:
            command: Command = self._commands.decode(body)
        except msgspec.DecodeError as error:  # malformed msgpack and, as ValidationError, the wrong types
            raise ChannelError(f"not a command: {error}") from error
        return command

    def report(self, body: bytes | memoryview) -> Report:
        """Raises ChannelError for anything that is not a report."""
        try:
            report: Report = self._reports.decode(body)
        except msgspec.DecodeError as error:
            raise ChannelError(f"not a report: {error}") from error
        return report


def body_length(header: bytes | bytearray | memoryview) -> int:
    """The length that 4 header bytes announce. Raises ChannelError when it is beyond MAX_FRAME."""
    length: int = _HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise ChannelError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
    return length


class _Inbox:
    """Reports that arrived and were not read yet: the asyncio half both channels share."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._ended = False
        self._failure: ChannelError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, report: Report) -> None:
        if not self._ended:
            self._reports.append(report)
            self._wake()

    def end(self, failure: ChannelError | None = None) -> None:
        """No more will come. The first call decides."""
        if not self._ended:
            self._ended = True
            self._failure = failure
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Report]:
        while True:
            while self._reports:
                yield self._reports.popleft()
            if self._ended:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure


class SocketChannel(asyncio.Protocol):
    """The server's end of a Unix socket. Made by `SocketChannel.open`."""

    def __init__(self) -> None:
        self._codec = Codec()
        self._inbox = _Inbox()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sock: socket.socket) -> "SocketChannel":
        """Take over a connected Unix stream socket."""
        _, channel = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        return channel

    def send(self, command: Command) -> None:
        """See EngineChannel."""
        if self._transport is None or self._transport.is_closing():
            raise ChannelClosed("the engine is gone")
        self._transport.write(self._codec.encode(command))

    def __aiter__(self) -> AsyncIterator[Report]:
        return self._inbox.__aiter__()

    def close(self) -> None:
        """See EngineChannel."""
        self._inbox.end()
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Until the socket is closed."""
        await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # what a stream socket gives, in uvloop by shape only

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            self._take_frames()
        except ChannelError as error:
            self._inbox.end(error)
            self.close()

    def _take_frames(self) -> None:
        start = 0
        size = len(self._received)
        with memoryview(self._received) as view:
            while size - start >= _HEADER.size:
                body = start + _HEADER.size
                end = body + body_length(view[start:body])
                if end > size:
                    break
                self._inbox.put(self._codec.report(view[body:end]))
                start = end
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        # A killed engine may leave half a frame or a reset behind: both mean no more than that it is gone.
        self._inbox.end()
        if not self._closed.done():
            self._closed.set_result(None)


class SocketPort:
    """The engine's end of a Unix socket: blocking, one reading thread, any number of sending ones."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._reader = sock.makefile("rb")
        self._incoming = Codec()
        self._outgoing = Codec()
        self._lock = threading.Lock()

    def receive(self) -> Command | None:
        """See EnginePort."""
        try:
            header = self._reader.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            length = body_length(header)
            body = self._reader.read(length)
        except (OSError, ValueError):  # reset by the server, or closed here while waiting
            return None
        return self._incoming.command(body) if len(body) == length else None

    def send(self, report: Report) -> None:
        """See EnginePort."""
        with self._lock:
            frame = self._outgoing.encode(report)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise ChannelClosed(f"the server is gone: {error}") from error

    def close(self) -> None:
        """See EnginePort."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()  # after the shutdown, which ended a `read` that held the reader's lock
        self._socket.close()


class _MemoryLink:
    """What the two ends of an in-memory channel share. Closing either end closes both."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.inbox = _Inbox()
        self.commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.closed = threading.Event()

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.commands.put(None)
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.inbox.end)


class MemoryChannel:
    """The server's end in memory."""

    def __init__(self, link: _MemoryLink) -> None:
        self._link = link
        self._codec = Codec()

    def send(self, command: Command) -> None:
        """See EngineChannel."""
        frame = self._codec.encode(command)
        if self._link.closed.is_set():
            raise ChannelClosed("the engine is gone")
        self._link.commands.put(frame)

    def __aiter__(self) -> AsyncIterator[Report]:
        return self._link.inbox.__aiter__()

    def close(self) -> None:
        """See EngineChannel."""
        self._link.inbox.end()
        self._link.close()


class MemoryPort:
    """The engine's end in memory."""

    def __init__(self, link: _MemoryLink) -> None:
        self._link = link
        self._incoming = Codec()
        self._outgoing = Codec()
        self._lock = threading.Lock()

    def receive(self) -> Command | None:
        """See EnginePort."""
        frame = self._link.commands.get()
        if frame is None:
            self._link.commands.put(None)  # the end stays the end
        return None if frame is None else self._incoming.command(memoryview(frame)[_HEADER.size :])

    def receive_nowait(self) -> Command | None:
        """The next command if there is one already; None if not. For a simulated engine on the server's own thread."""
        return self.receive() if not self._link.commands.empty() else None

    def send(self, report: Report) -> None:
        """See EnginePort."""
        with self._lock:
            frame = self._outgoing.encode(report)
            if self._link.closed.is_set():
                raise ChannelClosed("the server is gone")
            decoded = self._outgoing.report(memoryview(frame)[_HEADER.size :])
            self._link.loop.call_soon_threadsafe(self._link.inbox.put, decoded)

    def close(self) -> None:
        """See EnginePort."""
        self._link.close()


def memory_pair() -> tuple[MemoryChannel, MemoryPort]:
    """Both ends of an in-memory channel, for the running loop."""
    link = _MemoryLink(asyncio.get_running_loop())
    return MemoryChannel(link), MemoryPort(link)
