"""The worker's side of the watch (proto/watch.proto): what every router that asks is told about this worker.

1. subscribe  a router opens the stream: hello, then every routing block in the prefix index, in pieces, then the status
2. events     stored and removed ones, batched for 50 ms: a key that came and went in one batch is only its last state
3. heartbeat  the status, every `heartbeat_s` and whenever `publish_status` says that it changed
4. drop       a router that does not read loses its stream when its queue is full (FAULTS S02); it opens the watch again

Everything happens on the event loop; publishing never waits. Sequence numbers count per stream. What comes while the
pieces of the beginning are written waits behind them, so that the last word on a key is the newest. A piece is packed
when the one before it has been taken, so however much is cached no message is large and the loop stays free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from cluster.core.keys import KEYS_PER_MESSAGE, BlockKey, pack_keys
from cluster.rpc import Service, service
from cluster.stubs import watch_pb2, watch_pb2_grpc
from cluster.stubs.watch_pb2 import WatchEvent, WatchRequest

BATCH_S = 0.05
QUEUE_EVENTS = 256
_log = logging.getLogger(__name__)

SnapshotProvider = Callable[[], Sequence[BlockKey]]
StatusProvider = Callable[[], watch_pb2.Status]


@dataclass(slots=True, eq=False)
class _Subscriber:
    """One open stream: first its beginning, then `events`; it ends with None when the stream must end."""

    peer: str
    task: asyncio.Task[object] | None
    beginning: Iterator[WatchEvent]
    events: asyncio.Queue[WatchEvent | None] = field(default_factory=lambda: asyncio.Queue(QUEUE_EVENTS))
    sequence: int = 0


class WatchPublisher(watch_pb2_grpc.WatchServicer):
    """Tells routers about this worker. Call from the event loop only; `run` must be running for heartbeats.

    `snapshot` gives the key of every routing block in the prefix index now, `status` the worker's state now; both must
    be quick. `most` keys go into one message.
    """

    def __init__(
        self,
        hello: watch_pb2.WatchHello,
        snapshot: SnapshotProvider,
        status: StatusProvider,
        *,
        heartbeat_s: float,
        most: int = KEYS_PER_MESSAGE,
    ) -> None:
        self._hello = hello
        self._snapshot = snapshot
        self._status = status
        self._heartbeat_s = heartbeat_s
        self._most = most
        self._subscribers: set[_Subscriber] = set()
        self._pending: dict[bytes, bool] = {}  # key -> stored (True) or removed, last state of this batch
        self._flush: asyncio.TimerHandle | None = None

    @property
    def subscribers(self) -> int:
        """Open streams."""
        return len(self._subscribers)

    def service(self) -> Service:
        """What to give to `make_server`."""
        return service(watch_pb2.DESCRIPTOR, "Watch", watch_pb2_grpc.add_WatchServicer_to_server, self)

    def publish_stored(self, keys: Iterable[bytes]) -> None:
        """These blocks are now in the prefix index."""
        self._publish(keys, stored=True)

    def publish_removed(self, keys: Iterable[bytes]) -> None:
        """These blocks are no longer in the prefix index."""
        self._publish(keys, stored=False)

    def publish_status(self) -> None:
        """The status changed in a way that routers should know before the next heartbeat (ready, draining)."""
        if self._subscribers:
            self._send(WatchEvent(status=self._status()))

    async def run(self) -> None:
        """Send heartbeats until cancelled, then end every stream."""
        try:
            while True:
                self.publish_status()
                await asyncio.sleep(self._heartbeat_s)
        finally:
            self.close()

    def drop_all(self) -> None:
        """End every stream as if nobody read it; routers open the watch again."""
        for subscriber in list(self._subscribers):
            self._subscribers.discard(subscriber)
            self._kill(subscriber)

    def close(self) -> None:
        """End every stream; routers see an orderly end."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        for subscriber in list(self._subscribers):
            self._subscribers.discard(subscriber)
            if subscriber.events.full():
                self._kill(subscriber)
            else:
                subscriber.events.put_nowait(None)

    async def Open(  # type: ignore[override]  # a coroutine that writes is allowed too, and can end a stuck write
        self, request: WatchRequest, context: grpc.aio.ServicerContext[WatchRequest, WatchEvent]
    ) -> None:
        """Serve one router until it leaves, is dropped, or the worker stops."""
        subscriber = self._subscribe(context.peer())
        try:
            for opening in subscriber.beginning:
                await context.write(opening)
            while (event := await subscriber.events.get()) is not None:
                await context.write(event)
        except asyncio.CancelledError:
            if subscriber in self._subscribers:
                raise
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the watcher did not read; open the watch again")
        finally:
            self._subscribers.discard(subscriber)

    def _subscribe(self, peer: str) -> _Subscriber:
        """Snapshot and registration in one step of the loop: no event is missed, none comes twice."""
        self._flush_now()
        keys = self._snapshot()
        pieces = max(1, -(-len(keys) // self._most))
        subscriber = _Subscriber(peer, asyncio.current_task(), self._beginning(keys), sequence=1 + pieces)
        self._put(subscriber, WatchEvent(status=self._status()))
        self._subscribers.add(subscriber)
        return subscriber

    def _beginning(self, keys: Sequence[BlockKey]) -> Iterator[WatchEvent]:
        yield WatchEvent(sequence=1, hello=self._hello)
        for number, packed in enumerate(pack_keys(keys, self._most) if keys else [b""], 2):
            yield WatchEvent(sequence=number, snapshot=watch_pb2.Snapshot(keys=packed))

    def _publish(self, keys: Iterable[bytes], *, stored: bool) -> None:
        if not self._subscribers:
            return
        for key in keys:
            self._pending[key] = stored
        if self._pending and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(BATCH_S, self._flush_now)

    def _flush_now(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        pending, self._pending = self._pending, {}
        for packed in pack_keys([key for key, is_stored in pending.items() if not is_stored], self._most):
            self._send(WatchEvent(removed=watch_pb2.Removed(keys=packed)))
        for packed in pack_keys([key for key, is_stored in pending.items() if is_stored], self._most):
            self._send(WatchEvent(stored=watch_pb2.Stored(keys=packed)))

    def _send(self, event: WatchEvent) -> None:
        for subscriber in list(self._subscribers):
            self._put(subscriber, event)

    def _put(self, subscriber: _Subscriber, event: WatchEvent) -> None:
        if subscriber.events.full():
            _log.warning("dropped a watcher that does not read: %s", subscriber.peer)
            self._subscribers.discard(subscriber)
            self._kill(subscriber)
            return
        subscriber.sequence += 1
        numbered = WatchEvent(sequence=subscriber.sequence)
        numbered.MergeFrom(event)
        subscriber.events.put_nowait(numbered)

    @staticmethod
    def _kill(subscriber: _Subscriber) -> None:
        """The stream's task hangs in a write that nobody reads: only cancelling it frees the call."""
        if subscriber.task is not None:
            subscriber.task.cancel()
