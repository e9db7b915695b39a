"""The worker's side of the watch in simulation: the rules of cluster/watch.py on the virtual clock."""

from collections.abc import Callable, Iterable, Sequence

from cluster.core.keys import BlockKey, pack_keys
from cluster.stubs.watch_pb2 import Removed, Snapshot, Status, Stored, WatchEvent, WatchHello
from simulation.network import End
from simulation.process import Process

BATCH_S = 0.05  # as in cluster/watch.py, which cannot be imported without gRPC


class Publisher:
    """Hello, snapshot, status to each new watcher; then batched cache events and a heartbeat."""

    def __init__(
        self,
        process: Process,
        hello: WatchHello,
        snapshot: Callable[[], Sequence[BlockKey]],
        status: Callable[[], Status],
        heartbeat_s: float,
    ) -> None:
        self._process = process
        self._hello = hello
        self._snapshot = snapshot
        self._status = status
        self._heartbeat_s = heartbeat_s
        self._watchers: dict[int, tuple[End, int]] = {}
        self._pending: dict[bytes, bool] = {}
        self._made = 0

    def accept(self, end: End) -> None:
        """A router opens the stream; its request subscribes it."""
        self._made += 1
        number = self._made
        end.received = lambda _: self._subscribe(number, end)
        end.closed = lambda _: self._leave(number)

    def publish(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """What came into the prefix index and what left it, in one batch of BATCH_S."""
        if not self._watchers:
            return
        idle = not self._pending
        self._pending.update(dict.fromkeys(removed, False))
        self._pending.update(dict.fromkeys(stored, True))
        if self._pending and idle:
            self._process.timer(BATCH_S, self._flush)

    def beat(self) -> None:
        """The first heartbeat, and all others."""
        self.publish_status()
        self._process.timer(self._heartbeat_s, self.beat)

    def publish_status(self) -> None:
        if self._watchers:
            self._send(WatchEvent(status=self._status()))

    def _subscribe(self, number: int, end: End) -> None:
        self._flush()
        self._watchers[number] = (end, 0)
        self._put(number, WatchEvent(hello=self._hello))
        for packed in list(pack_keys(self._snapshot())) or [b""]:
            self._put(number, WatchEvent(snapshot=Snapshot(keys=packed)))
        self._put(number, WatchEvent(status=self._status()))

    def _leave(self, number: int) -> None:
        self._watchers.pop(number, None)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for packed in pack_keys([key for key, is_stored in pending.items() if not is_stored]):
            self._send(WatchEvent(removed=Removed(keys=packed)))
        for packed in pack_keys([key for key, is_stored in pending.items() if is_stored]):
            self._send(WatchEvent(stored=Stored(keys=packed)))

    def _send(self, event: WatchEvent) -> None:
        for number in self._watchers:
            self._put(number, event)

    def _put(self, number: int, event: WatchEvent) -> None:
        end, sequence = self._watchers[number]
        self._watchers[number] = (end, sequence + 1)
        numbered = WatchEvent(sequence=sequence + 1)
        numbered.MergeFrom(event)
        end.send(numbered)
