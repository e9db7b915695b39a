"""Fault points of an engine: each does what its name says, at the occurrence that was asked for, and no other."""

import queue

import numpy as np
import pytest

from cluster.core.clock import ManualClock
from cluster.core.faults import Faults, FaultSpec
from engine.blocks import BlockBooks
from engine.faults import make_books, staged, with_read_faults, with_step_faults
from engine.messages import ReadDone, ReadFailed, Report, Step, StepDone
from engine.wire import Transport
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport

STEP = Step(plan=1, rows=[], drop=[])
DONE = StepDone(1, [], [], {}, 0.0)


def faults(point: str, *, seconds: float = 0.0, nth: int = 2) -> Faults:
    return Faults([FaultSpec(point, seconds, nth=nth)])


class Reading:
    """A reader behind fault points, and a holder whose pool is full of sevens."""

    def __init__(self, set_faults: Faults) -> None:
        self.clock = ManualClock()
        network = InProcessNetwork()
        self._pool = np.full((4, 64), 7, np.uint8)
        self.staging = np.zeros((4, 64), np.uint8)
        holder = InProcessTransport(network, "holder", self.clock)
        self.inner = InProcessTransport(network, "reader", self.clock)
        self.transport: Transport = with_read_faults(self.inner, set_faults, self.clock)
        metadata = holder.register(self._pool, np.zeros((1, 64), np.uint8))
        self.transport.register(np.zeros((1, 64), np.uint8), self.staging)
        self.transport.add_peer("holder", metadata, int(self._pool.ctypes.data))
        self.transport.poll()

    def read(self, number: int) -> list[object]:
        """One block into the slot of that number; what is reported at once."""
        self.transport.read(number, "holder", [(int(self._pool.ctypes.data), 64)], number)
        return list(self.transport.poll())


def test_nothing_is_wrapped_without_a_fault() -> None:
    def run(step: Step) -> StepDone:
        return DONE

    none = faults("link.break")
    assert with_step_faults(run, none) is run
    reading = Reading(none)
    assert reading.transport is reading.inner
    assert type(make_books(4, none)) is BlockBooks


def test_a_read_is_corrupted_in_staging() -> None:
    reading = Reading(faults("read.corrupt"))
    for number in (1, 2, 3):
        assert reading.read(number) == [ReadDone(number, 0.0)]
    assert (reading.staging[[1, 3]] == 7).all()
    assert (reading.staging[2] != 7).sum() == 1


def test_a_read_fails() -> None:
    reading = Reading(faults("read.fail"))
    reports = [reading.read(number)[0] for number in (1, 2, 3)]
    assert [type(report) for report in reports] == [ReadDone, ReadFailed, ReadDone]
    assert reports[1] == ReadFailed(2, "fault point read.fail")


def test_a_read_is_late() -> None:
    reading = Reading(faults("read.delay", seconds=2.0))
    assert reading.read(1) == [ReadDone(1, 0.0)]
    assert reading.read(2) == []
    assert reading.transport.busy, "the wire thread must go on looking"
    assert reading.read(3) == [ReadDone(3, 0.0)]
    reading.clock.advance(1.9)
    assert reading.transport.poll() == []
    reading.clock.advance(0.1)
    assert reading.transport.poll() == [ReadDone(2, 0.0)]
    assert not reading.transport.busy


@pytest.mark.parametrize(
    ("point", "seconds", "seen"),
    [
        ("step.delay", 0.5, ["run", 0.5, "run", "run"]),
        ("engine.freeze", 9.0, ["run", "run", 9.0, "run"]),
        ("engine.kill", 0.0, ["run", "run", "killed", "run"]),
    ],
)
def test_steps(point: str, seconds: float, seen: list[object]) -> None:
    happened: list[object] = []

    def run(step: Step) -> StepDone:
        happened.append("run")
        return DONE

    disturbed = with_step_faults(
        run, faults(point, seconds=seconds), wait=happened.append, kill=lambda: happened.append("killed")
    )
    assert [disturbed(STEP) for _ in range(3)] == [DONE] * 3
    assert happened == seen


def test_a_reservation_is_refused_and_leaves_the_books_as_they_were() -> None:
    books = make_books(4, faults("allocate.fail"))
    assert books.allocate(1, "a") == [0]
    assert books.allocate(0, "a") == [], "nothing was asked for: no occurrence"
    assert books.allocate(1, "b") is None
    assert books.available == 3
    assert books.allocate(1, "b") == [1]


async def test_stages_of_the_engine_are_passed_after_their_report_was_dealt_with() -> None:
    seen: queue.SimpleQueue[object] = queue.SimpleQueue()
    reports: list[Report] = [DONE, ReadFailed(1, "x"), ReadDone(2, 0.0)]

    async def source() -> object:
        for report in reports:
            yield report

    async for report in staged(source(), seen.put):  # type: ignore[arg-type]
        seen.put(report)
    assert [seen.get_nowait() for _ in range(seen.qsize())] == [DONE, "step", reports[1], reports[2], "read"]
