"""The in-process transport's own behaviour; what it shares with the others is in tests/contract/test_transport.py."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.core.clock import ManualClock
from cluster.core.errors import TransferError
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport

Bytes = NDArray[np.uint8]


class Pair:
    """A holder with a filled pool and a reader that knows it."""

    def __init__(self) -> None:
        self.network, self.clock = InProcessNetwork(), ManualClock()
        self.pool = np.random.default_rng(0).integers(0, 256, (8, 64), np.uint8)
        self.staging = np.zeros((2, 128), np.uint8)
        self.holder = InProcessTransport(self.network, "holder", self.clock)
        self.reader = InProcessTransport(self.network, "reader", self.clock)
        metadata = self.holder.register(self.pool, np.zeros((1, 64), np.uint8))
        self.reader.register(np.zeros((1, 64), np.uint8), self.staging)
        self.reader.add_peer("holder", metadata, int(self.pool.ctypes.data))
        assert self.reader.busy
        assert self.reader.poll() == [PeerAdded("holder", False, math.inf)]

    def range(self, block: int, size: int = 64) -> tuple[int, int]:
        return int(self.pool.ctypes.data) + block * 64, size


def test_ranges_land_back_to_back_in_their_slot() -> None:
    pair = Pair()
    assert not pair.reader.busy
    pair.reader.read(9, "holder", [pair.range(5), pair.range(2, 24)], 1)
    assert pair.reader.busy
    pair.clock.advance(0.25)
    assert pair.reader.poll() == [ReadDone(9, 0.25)]
    assert not pair.reader.busy
    assert (pair.staging[1, :64] == pair.pool[5]).all()
    assert (pair.staging[1, 64:88] == pair.pool[2, :24]).all()
    assert not pair.staging[1, 88:].any()
    assert not pair.staging[0].any()


def test_a_read_sees_what_the_holder_wrote_meanwhile() -> None:
    pair = Pair()
    pair.reader.read(1, "holder", [pair.range(0)], 0)
    pair.pool[0] = 7
    pair.reader.poll()
    assert (pair.staging[0, :64] == 7).all()


def test_reads_in_progress_survive_drop_and_leave() -> None:
    pair = Pair()
    pair.reader.read(1, "holder", [pair.range(0)], 0)
    pair.reader.drop_peer("holder")
    pair.holder.close()
    pair.reader.read(2, "holder", [pair.range(0)], 1)
    ended = pair.reader.poll()
    assert ended[0] == ReadDone(1, 0.0)
    assert isinstance(ended[1], ReadFailed)
    assert "unknown or gone" in ended[1].reason


@pytest.mark.parametrize(
    ("offset", "size", "slot", "reason"),
    [
        (-8, 8, 0, "not in the pool"),
        (8 * 64 - 8, 16, 0, "not in the pool"),
        (0, 0, 0, "not in the pool"),
        (0, 129, 0, "do not fit"),
        (0, 8, 2, "does not exist"),
        (0, 8, -1, "does not exist"),
    ],
)
def test_what_does_not_fit_fails_and_touches_nothing(offset: int, size: int, slot: int, reason: str) -> None:
    pair = Pair()
    pair.reader.read(3, "holder", [(int(pair.pool.ctypes.data) + offset, size)], slot)
    (ended,) = pair.reader.poll()
    assert isinstance(ended, ReadFailed)
    assert ended.id == 3
    assert reason in ended.reason
    assert not pair.staging.any()


def test_peers_must_exist_and_be_who_they_say() -> None:
    pair = Pair()
    address = int(pair.pool.ctypes.data)
    pair.reader.add_peer("nobody", b"nobody", address)
    pair.reader.add_peer("holder", b"reader", address)
    pair.reader.add_peer("holder", b"holder", address + 64)
    ended = pair.reader.poll()
    reasons = ["cannot be reached", "metadata", "does not begin"]
    for failed, reason in zip(ended, reasons, strict=True):
        assert isinstance(failed, PeerFailed)
        assert reason in failed.reason
    pair.reader.drop_peer("nobody")


def test_serving_needs_no_polls() -> None:
    pair = Pair()
    pair.holder.serve(True)
    assert not pair.holder.busy


def test_a_name_belongs_to_one_agent_until_it_leaves() -> None:
    pair = Pair()
    twin = InProcessTransport(pair.network, "holder", pair.clock)
    with pytest.raises(TransferError, match="registered already"):
        twin.register(pair.pool, pair.staging)
    pair.holder.close()
    assert twin.register(pair.pool, pair.staging) == b"holder"
