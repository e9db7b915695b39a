"""The session stream to one decode worker (proto/session.proto): requests out, tokens in.

The reader never waits for a client and the writer never for the reader: what goes out is queued here, what comes in
goes straight to the core. What is queued for a stream that ended is dropped with it: the next one starts with a hello
that names all that the router still wants.

What is queued when a message has gone leaves as one. That an attempt is settled is news to nobody: it waits SETTLE_S
for something to go with.
"""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio

from cluster.core.clock import Clock
from cluster.credentials import Credentials
from cluster.rpc import channel, proof_metadata
from cluster.streams import MAX_BATCH, next_batch
from cluster.stubs.session_pb2 import FromDecode, FromRouter
from cluster.stubs.session_pb2_grpc import SessionStub
from router.effects import StreamClosed, StreamOpened
from router.links import OnFailure, StreamKeeper, answered, connect

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[FromRouter, FromDecode]

OnSession = Callable[[str, FromDecode | StreamOpened | StreamClosed], None]
_FLUSH_S = 1.0
SETTLE_S = 0.05


class SessionClient(StreamKeeper):
    """Reports every message to `on_event`, on the event loop; `send` never waits."""

    longest_delay_s = 0.5  # requests wait for it, and not for long (timing.resume_s)

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        clock: Clock,
        rng: random.Random,
        failed: OnFailure,
        *,
        on_event: OnSession,
    ) -> None:
        super().__init__(address, credentials, clock, rng, failed)
        self._on_event = on_event
        self._outbox: asyncio.Queue[FromRouter | None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._settled: list[FromRouter] = []

    def send(self, message: FromRouter) -> None:
        """Queue a message for the stream that is up; without one it is dropped."""
        outbox = self._outbox
        if outbox is None:
            return
        if message.HasField("ended"):
            if not self._settled:
                asyncio.get_running_loop().call_later(SETTLE_S, self._settle, outbox)
            self._settled.append(message)
            return
        outbox.put_nowait(message)
        self._settle(outbox)

    async def serve(self) -> str:
        async with channel(self.address, self._credentials.tls) as connection:
            await connect(connection)
            proof = self._credentials.proof(self.address)
            call = SessionStub(connection).Open(None, metadata=proof_metadata(proof))
            await answered(call, proof)
            outbox: asyncio.Queue[FromRouter | None] = asyncio.Queue()
            self._outbox, self._settled = outbox, []
            writer = self._writer = asyncio.create_task(_write(call, outbox), name=f"session writer {self.address}")
            try:
                self._on_event(self.address, StreamOpened())
                while isinstance(message := await call.read(), FromDecode):
                    for event in message.batch or (message,):
                        if not self.current:
                            return "dropped"
                        self._on_event(self.address, event)
                return "the worker ended the session"
            finally:
                if self._outbox is outbox:
                    self._outbox = None
                writer.cancel()
                call.cancel()

    async def close(self) -> None:
        """Send what is queued, within a second, then end."""
        if self._outbox is not None and self._writer is not None:
            self._settle(self._outbox)
            self._outbox.put_nowait(None)
            await asyncio.wait([self._writer], timeout=_FLUSH_S)
        await super().close()

    def _settle(self, outbox: "asyncio.Queue[FromRouter | None]") -> None:
        """Let go what waits for something to go with, if it is of the stream that is up."""
        if outbox is self._outbox:
            for message in self._settled:
                outbox.put_nowait(message)
            self._settled.clear()

    def report_closed(self, event: StreamClosed) -> None:
        self._on_event(self.address, event)


async def _write(call: "Call", outbox: "asyncio.Queue[FromRouter | None]") -> None:
    """Send what is queued; None is the end of it."""
    try:
        most = 1  # the hello goes by itself
        while messages := await next_batch(outbox, most):
            await call.write(messages[0] if len(messages) == 1 else FromRouter(batch=messages))
            most = MAX_BATCH
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the stream has ended: its reader sees the same and says why
