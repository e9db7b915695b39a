"""The wire thread's own duties, with a transport that notes who calls it and when."""

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from cluster.core.errors import TransferError
from engine.messages import AddPeer, DropPeer, PeerAdded, PeerFailed, Read, ReadDone, ReadFailed, Report, Serve
from engine.wire import Bytes
from engine.wire_thread import WireThread

MEMORY = np.zeros((2, 64), np.uint8)
TIMEOUT_S = 10.0


class Noting:
    """A transport whose reads end after a number of polls."""

    name = "noting"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.polls = 0
        self._serving = False
        self._peers: list[PeerAdded | PeerFailed] = []
        self._left: dict[int, int] = {}

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def register(self, pool: Bytes, staging: Bytes) -> bytes:
        assert isinstance(pool, np.ndarray)
        assert isinstance(staging, np.ndarray)
        self._note(f"register {pool.shape} {staging.shape}")
        return b"metadata"

    def add_peer(self, peer: str, metadata: bytes, pool_address: int) -> None:
        self._note(f"add {peer} {pool_address}")
        if metadata == b"bug":
            raise AssertionError("a bug in the transport")
        failed = metadata == b"bad"
        self._peers.append(PeerFailed(peer, "bad metadata") if failed else PeerAdded(peer, False, 2.0))

    def serve(self, on: bool) -> None:
        self._note(f"serve {on}")
        self._serving = on

    def drop_peer(self, peer: str) -> None:
        self._note(f"drop {peer}")

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        self._note(f"read {read_id}")
        self._left[read_id] = slot  # the test says by the slot after how many polls it ends

    def poll(self) -> list[ReadDone | ReadFailed | PeerAdded | PeerFailed]:
        self.polls += 1
        self.threads.add(threading.get_ident())
        self._left = {read_id: left - 1 for read_id, left in self._left.items()}
        ended = [read_id for read_id, left in self._left.items() if left <= 0]
        for read_id in ended:
            del self._left[read_id]
        peers, self._peers = self._peers, []
        return [*peers, *(ReadDone(read_id, 0.0) for read_id in ended)]

    @property
    def busy(self) -> bool:
        return bool(self._left) or bool(self._peers) or self._serving

    def close(self) -> None:
        self._note("close")


class Bench:
    """A wire thread with queues for what it says."""

    def __init__(self) -> None:
        self.transport = Noting()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.wire = WireThread(self.reports.put, self.failures.put)

    def start(self) -> tuple[str, bytes]:
        return self.wire.start(lambda: self.transport, MEMORY, MEMORY)

    def next(self) -> Report:
        return self.reports.get(timeout=TIMEOUT_S)


def test_one_thread_makes_every_call() -> None:
    bench = Bench()
    bench.wire.submit(AddPeer("early", b"", 8))  # before the start: waits for it
    assert bench.start() == ("noting", b"metadata")
    assert bench.next() == PeerAdded("early", False, 2.0)
    bench.wire.submit(DropPeer("early"))
    bench.wire.submit(Read(4, "p", [(0, 8)], 1))
    assert bench.next() == ReadDone(4, 0.0)
    bench.wire.stop()
    assert bench.transport.calls == ["register (2, 64) (2, 64)", "add early 8", "drop early", "read 4", "close"]
    assert len(bench.transport.threads) == 1
    assert threading.get_ident() not in bench.transport.threads


def test_it_polls_until_reads_end_and_then_no_more() -> None:
    bench = Bench()
    bench.start()
    bench.wire.submit(Read(1, "p", [(0, 8)], 20))
    bench.wire.submit(Read(2, "p", [(0, 8)], 5))
    assert [bench.next(), bench.next()] == [ReadDone(2, 0.0), ReadDone(1, 0.0)]
    polls = bench.transport.polls
    with pytest.raises(queue.Empty):
        bench.reports.get(timeout=0.1)
    assert bench.transport.polls <= polls + 1
    bench.wire.stop()


def test_it_polls_while_peers_may_be_reading() -> None:
    bench = Bench()
    bench.start()
    bench.wire.submit(Serve(True))
    with pytest.raises(queue.Empty):
        bench.reports.get(timeout=0.2)
    polls = bench.transport.polls
    assert 20 < polls < 1100  # every 0.2 ms at most
    bench.wire.submit(Serve(False))
    bench.wire.submit(AddPeer("x", b"", 0))
    bench.next()
    polls = bench.transport.polls
    with pytest.raises(queue.Empty):
        bench.reports.get(timeout=0.1)
    assert bench.transport.polls <= polls + 1
    bench.wire.stop()


def test_a_peer_that_cannot_be_added_is_a_report() -> None:
    bench = Bench()
    bench.start()
    bench.wire.submit(AddPeer("x", b"bad", 0))
    assert bench.next() == PeerFailed("x", "bad metadata")
    bench.wire.submit(AddPeer("y", b"", 0))
    assert bench.next() == PeerAdded("y", False, 2.0)
    bench.wire.stop()


def test_an_unexpected_error_is_told_and_the_transport_closed() -> None:
    bench = Bench()
    bench.start()
    bench.wire.submit(AddPeer("x", b"bug", 0))
    assert "a bug in the transport" in str(bench.failures.get(timeout=TIMEOUT_S))
    bench.wire.stop()
    assert bench.transport.calls[-1] == "close"


def _broken() -> Noting:
    raise TransferError("no such device")


@pytest.mark.parametrize("make", [_broken])
def test_start_raises_what_the_transport_raised(make: Callable[[], Noting]) -> None:
    bench = Bench()
    with pytest.raises(TransferError, match="no such device"):
        bench.wire.start(make, MEMORY, MEMORY)
    bench.wire.stop()


def test_stop_without_start_returns() -> None:
    Bench().wire.stop()
