"""What modelled workers tell routers: hello, cached prefixes in batches, status (cluster/watch.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.modelled.hardware import Hardware
from benchmarks.modelled.traces import BLOCK, FINGERPRINT
from cluster.core.keys import BlockKey, pack_keys
from cluster.core.protocol import PROTOCOL
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.watch_pb2 import Removed, Snapshot, Status, Stored, WatchEvent, WatchHello
from engine.blocks import BlockBooks
from simulation.loop import Loop

BATCH_S = 0.05
HEARTBEAT_S = 0.5
MAX_CONTEXT = 1 << 20
VOCAB = 1 << 30


class Worker(Protocol):
    """What a publisher tells of."""

    role: str
    name: str
    epoch: int
    hardware: Hardware
    books: BlockBooks

    @property
    def address(self) -> str: ...

    def status(self) -> Status: ...


def identity(worker: Worker) -> WorkerIdentity:
    """Layers and heads are those of a layout with the hardware's KV per position."""
    layout = Layout(layers=1, kv_heads=1, head_dim=worker.hardware.kv_bytes // 4, block_size=BLOCK, dtype="bfloat16")
    return WorkerIdentity(
        worker=worker.name,
        epoch=worker.epoch,
        role=worker.role,
        address=worker.address,
        layout=layout,
        fingerprint=FINGERPRINT,
        protocol=PROTOCOL,
    )


class Publisher:
    """The watch streams of one worker."""

    def __init__(self, loop: Loop, worker: Worker) -> None:
        self._loop = loop
        self._worker = worker
        self._watchers: dict[str, tuple[Callable[[WatchEvent], None], int]] = {}
        self._pending: dict[BlockKey, bool] = {}

    def subscribe(self, router: str, hear: Callable[[WatchEvent], None]) -> None:
        """A router opens its watch, or opens it again."""
        worker = self._worker
        self._watchers[router] = (hear, 0)
        hello = WatchHello(
            identity=identity(worker),
            vocab_size=VOCAB,
            max_context=MAX_CONTEXT,
            num_blocks=worker.books.num_blocks,
            block_size=BLOCK,
            routing_stride=worker.books.routing_stride,
        )
        self._put(router, WatchEvent(hello=hello))
        for packed in list(pack_keys(worker.books.routing_keys())) or [b""]:
            self._put(router, WatchEvent(snapshot=Snapshot(keys=packed)))
        self._put(router, WatchEvent(status=worker.status()))

    def publish(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        """What came into the prefix index and what left it; told in one batch."""
        idle = not self._pending
        self._pending.update(dict.fromkeys(removed, False))
        self._pending.update(dict.fromkeys(stored, True))
        if self._pending and idle:
            self._loop.after(BATCH_S, self._flush)

    def beat(self) -> None:
        """The first heartbeat, and all others."""
        for router in self._watchers:
            self._put(router, WatchEvent(status=self._worker.status()))
        self._loop.after(HEARTBEAT_S, self.beat)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        removed = [key for key, is_stored in pending.items() if not is_stored]
        stored = [key for key, is_stored in pending.items() if is_stored]
        for router in self._watchers:
            for packed in pack_keys(removed):
                self._put(router, WatchEvent(removed=Removed(keys=packed)))
            for packed in pack_keys(stored):
                self._put(router, WatchEvent(stored=Stored(keys=packed)))

    def _put(self, router: str, event: WatchEvent) -> None:
        hear, sequence = self._watchers[router]
        self._watchers[router] = (hear, sequence + 1)
        event.sequence = sequence + 1
        hear(event)
