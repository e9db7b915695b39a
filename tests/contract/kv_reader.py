"""A reader of KV for the transport contract: a wire thread in this process, what it reported, and its holders."""

import os
import queue
from collections.abc import Iterator

import numpy as np

from engine.messages import AddPeer, PeerAdded, PeerFailed, Read, ReadDone, ReadFailed, Report
from engine.wire import Transport
from engine.wire_thread import WireThread
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport
from kv_transfer.transports.nixl import NixlTransport
from tests.contract.kv_holder import BLOCK_BYTES, Holder, LocalHolder, ProcessHolder, SlowClock, content

OPTIONS = {
    "cma": {"require": "shm"},
    "tcp": {"require": "tcp", "devices": "lo", "port_range": "21000-21999"},
}
SLOTS = 8
PER_SLOT = 11
PATIENCE_S = 60.0  # how long what must come may take: a failure, so it may be long
QUIET_S = 0.3  # how long nothing must come
UNTOUCHED = 0xA5
CONTENT = content()


class World:
    """A reader and, while a test wants one, a holder."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.clock = SlowClock()
        self.staging = np.zeros((SLOTS, PER_SLOT * BLOCK_BYTES), np.uint8)
        self.transport: Transport | None = None
        self._network = InProcessNetwork()
        self._holders: list[Holder] = []
        self._reports: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()
        self.wire = WireThread(self._reports.put, self._reports.put)
        self.wire.start(self._make, np.zeros((1, BLOCK_BYTES), np.uint8), self.staging)

    def _make(self) -> Transport:
        if self.kind == "inprocess":
            self.transport = InProcessTransport(self._network, "reader-1", self.clock)
        else:
            self.transport = NixlTransport("reader-1", OPTIONS[self.kind], self.clock)
        return self.transport

    def start_holder(self, **options: str) -> Holder:
        """Another holder, as a restarted worker: a new process under a new name."""
        agent = f"holder-{len(self._holders)}"
        if self.kind == "inprocess":
            self._holders.append(LocalHolder(agent, self._network))
        else:
            self._holders.append(ProcessHolder(agent, {**OPTIONS[self.kind], **options}))
        return self._holders[-1]

    def add(self, holder: Holder) -> PeerAdded | PeerFailed:
        self.wire.submit(AddPeer(holder.agent, holder.metadata, holder.address))
        answer = self.next()
        assert isinstance(answer, PeerAdded | PeerFailed), answer
        return answer

    def read(self, read_id: int, holder: Holder, blocks: range, slot: int) -> None:
        self.read_ranges(read_id, holder, [(holder.address + b * BLOCK_BYTES, BLOCK_BYTES) for b in blocks], slot)

    def read_ranges(self, read_id: int, holder: Holder, ranges: list[tuple[int, int]], slot: int) -> None:
        self.wire.submit(Read(read_id, holder.agent, ranges, slot))

    def next(self) -> Report:
        """The next report; a failure when none comes."""
        report = self._reports.get(timeout=PATIENCE_S)
        assert not isinstance(report, BaseException), report
        return report

    def done(self, *read_ids: int) -> None:
        """These reads are the next to end, in any order, all well."""
        reports = [self.next() for _ in read_ids]
        assert all(isinstance(report, ReadDone) for report in reports), reports
        assert sorted(report.id for report in reports if isinstance(report, ReadDone)) == sorted(read_ids)

    def refused(self, read_id: int) -> str:
        """The next report is this read's failure; its reason."""
        report = self.next()
        assert isinstance(report, ReadFailed), report
        assert report.id == read_id
        return report.reason

    def silent(self) -> bool:
        """Whether nothing is reported for a while."""
        report = self.early()
        assert report is None, f"reported: {report}"
        return True

    def early(self) -> Report | BaseException | None:
        """What is reported within a while, or None."""
        try:
            return self._reports.get(timeout=QUIET_S)
        except queue.Empty:
            return None

    def landed(self, slot: int, blocks: range) -> bool:
        got = self.staging[slot, : len(blocks) * BLOCK_BYTES].reshape(len(blocks), BLOCK_BYTES)
        return np.array_equal(got, CONTENT[blocks.start : blocks.stop])

    def close(self) -> None:
        self.wire.stop()
        for holder in self._holders:
            holder.kill()


def make_world(kind: str) -> Iterator[World]:
    before = dict(os.environ)  # NIXL's transport sets UCX's variables
    world = World(kind)
    try:
        yield world
    finally:
        world.close()
        os.environ.clear()
        os.environ.update(before)
