"""Links of a decode worker: one gRPC stream to each prefill worker, dialled when the core asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from cluster.core.errors import TransferError
from cluster.credentials import Credentials
from cluster.rpc import channel, check_answer, proof_metadata
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, PrefillHello
from cluster.stubs.link_pb2_grpc import LinkStub

HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Where a link's events go: the core, by way of the server."""

    opened: Callable[[str, PrefillHello], None]
    received: Callable[[str, FromPrefill], None]
    closed: Callable[[str, str], None]


class Links:
    """Every open link. `send` never waits. `failure` gets an exception when a link breaks in a way nobody foresaw."""

    def __init__(self, identity: WorkerIdentity, credentials: Credentials, events: LinkEvents) -> None:
        self._identity = identity
        self._credentials = credentials
        self._events = events
        self._outgoing: dict[str, asyncio.Queue[FromDecodePeer]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def dial(self, peer: str, address: str) -> None:
        """Open a link in the background; `opened` or `closed` follows."""
        self._outgoing[peer] = asyncio.Queue()
        task = self._tasks[peer] = asyncio.ensure_future(self._run(peer, address))
        task.add_done_callback(self._ended)

    def send(self, peer: str, message: FromDecodePeer) -> None:
        queue = self._outgoing.get(peer)
        if queue is not None:
            queue.put_nowait(message)

    def hang_up(self, peer: str) -> None:
        """Close a link without a further word."""
        self._outgoing.pop(peer, None)
        task = self._tasks.pop(peer, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Hang up everywhere."""
        tasks = list(self._tasks.values())
        for peer in list(self._tasks):
            self.hang_up(peer)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, peer: str, address: str) -> None:
        reason = "the link ended"
        try:
            async with channel(address, self._credentials.tls) as connection:
                proof = self._credentials.proof(address)
                # grpc's type stubs know only the form with a request iterator; we write by hand.
                call = LinkStub(connection).Open(metadata=proof_metadata(proof))  # type: ignore[call-arg]
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await check_answer(call, proof)
                    await self._greet(peer, call)
                if self._tasks.get(peer) is not asyncio.current_task():
                    return  # hung up because of what the hello said
                reason = await self._talk(peer, call)
        except TimeoutError:
            reason = f"no hello within {HELLO_TIMEOUT_S:.0f} s"
        except (TransferError, ConnectionError) as error:
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        if self._tasks.get(peer) is asyncio.current_task():
            self.hang_up_quietly(peer)
            self._events.closed(peer, reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What nobody foresaw is a bug: the worker must not go on half deaf."""
        if not task.cancelled() and task.exception() is not None and not self.failure.done():
            self.failure.set_exception(task.exception() or AssertionError())

    def hang_up_quietly(self, peer: str) -> None:
        """Forget a link whose task is ending by itself."""
        self._outgoing.pop(peer, None)
        self._tasks.pop(peer, None)

    async def _greet(self, peer: str, call: grpc.aio.StreamStreamCall[FromDecodePeer, FromPrefill]) -> None:
        await call.write(FromDecodePeer(hello=self._identity))
        first = await call.read()
        if not isinstance(first, FromPrefill):
            raise TransferError(await _end_of(call))
        self._events.opened(peer, first.hello)

    async def _talk(self, peer: str, call: grpc.aio.StreamStreamCall[FromDecodePeer, FromPrefill]) -> str:
        writing = asyncio.ensure_future(self._write(peer, call))
        try:
            while isinstance(message := await call.read(), FromPrefill):
                if message.WhichOneof("message") == "lost":
                    return str(message.lost.reason)
                self._events.received(peer, message)
            return await _end_of(call)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, peer: str, call: grpc.aio.StreamStreamCall[FromDecodePeer, FromPrefill]) -> None:
        queue = self._outgoing[peer]
        while True:
            await call.write(await queue.get())


async def _end_of(call: grpc.aio.StreamStreamCall[FromDecodePeer, FromPrefill]) -> str:
    """Why a call has ended."""
    return f"{(await call.code()).name}: {await call.details()}"
