"""One end of a bidirectional gRPC stream on a server: messages out without ever waiting for the reader.

What waits when a message has gone may leave as one (`join`): in grpc.aio every message costs 50 us at either end.

A peer that does not read loses its stream when `limit` messages wait for it; nobody else is slowed (DESIGN §6).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import grpc.aio

MAX_BATCH = 16  # a prompt may have megabytes, and a message no more than MAX_MESSAGE_BYTES
Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class ServerStream(Generic[Incoming, Outgoing]):
    """Runs one accepted stream: `send` queues, `run` reads and writes until either side ends."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Incoming, Outgoing],
        *,
        limit: int = 10_000,
        join: Callable[[list[Outgoing]], Outgoing] | None = None,
    ) -> None:
        self._context = context
        self._join = join
        self._queue: asyncio.Queue[Outgoing | None] = asyncio.Queue()
        self._limit = limit
        self._cut = asyncio.Event()
        self._writing = False

    @property
    def waiting(self) -> bool:
        """Whether a message has not been handed to the transport yet."""
        return self._writing or not self._queue.empty()

    def send(self, message: Outgoing) -> None:
        """Queue a message; a reader that is too far behind is cut off instead."""
        if self._cut.is_set():
            return
        if self._queue.qsize() >= self._limit:
            self.cut()
        else:
            self._queue.put_nowait(message)

    def close(self) -> None:
        """End the stream after what is queued."""
        if not self._cut.is_set():
            self._queue.put_nowait(None)

    def cut(self) -> None:
        """End the stream at once, without what is queued, and take no more."""
        self._cut.set()
        while not self._queue.empty():
            self._queue.get_nowait()

    async def run(self, incoming: AsyncIterator[Incoming], receive: Callable[[Incoming], None]) -> None:
        """Until the peer ends the stream, breaks it, or `close` or `cut` was called.

        The cut is waited for beside the writing: who does not read leaves a write that never ends.
        """
        reading = asyncio.ensure_future(self._read(incoming, receive))
        writing = asyncio.ensure_future(self._write())
        cutting = asyncio.ensure_future(self._cut.wait())
        tasks = (reading, writing, cutting)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            broken = isinstance(outcome, asyncio.CancelledError | grpc.RpcError | grpc.aio.BaseError)
            if isinstance(outcome, BaseException) and not broken:
                raise outcome

    async def _read(self, incoming: AsyncIterator[Incoming], receive: Callable[[Incoming], None]) -> None:
        async for message in incoming:
            receive(message)

    async def _write(self) -> None:
        while messages := await next_batch(self._queue, 1 if self._join is None else MAX_BATCH):
            self._writing = True
            message = messages[0] if self._join is None or len(messages) == 1 else self._join(messages)
            await self._context.write(message)
            self._writing = False


async def next_batch(queue: asyncio.Queue[Outgoing | None], most: int) -> list[Outgoing]:
    """What waits in a queue, or comes next; at most so many. Empty: a None was reached, which is its end."""
    first = await queue.get()
    if first is None:
        return []
    messages = [first]
    while len(messages) < most and not queue.empty():
        message = queue.get_nowait()
        if message is None:
            queue.put_nowait(None)  # nothing is behind it
            break
        messages.append(message)
    return messages
