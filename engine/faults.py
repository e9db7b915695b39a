"""Fault points of an engine (cluster/core/faults.py): its steps, its reads, its books. Used only where one is set."""

import os
import signal
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator

import numpy as np

from cluster.core.clock import Clock, sleep
from cluster.core.errors import TransferError
from cluster.core.faults import Faults, FaultSpec, Trigger
from engine.blocks import BlockBooks, Owner
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed, Report, Step, StepDone
from engine.wire import Bytes, DeviceBytes, HostBytes, Transport

RunStep = Callable[[Step], StepDone]
Ended = ReadDone | ReadFailed | PeerAdded | PeerFailed


def kill_this_process() -> None:
    """SIGKILL: no handler, no farewell."""
    os.kill(os.getpid(), signal.SIGKILL)


def with_step_faults(
    run: RunStep,
    faults: Faults,
    wait: Callable[[float], None] = sleep,
    kill: Callable[[], None] = kill_this_process,
) -> RunStep:
    """`run`, or `run` between the step faults that are set. `wait` keeps the calling thread for so many seconds."""
    delay, freeze, end = (faults.trigger(point) for point in ("step.delay", "engine.freeze", "engine.kill"))
    if delay is None and freeze is None and end is None:
        return run

    def disturbed(step: Step) -> StepDone:
        _wait_if(delay, wait)
        done = run(step)
        _wait_if(freeze, wait)
        if end is not None and end.hit() is not None:
            kill()
        return done

    return disturbed


def _wait_if(trigger: Trigger | None, wait: Callable[[float], None]) -> None:
    if trigger is not None and (spec := trigger.hit()) is not None:
        wait(spec.seconds)


def with_read_faults(transport: Transport, faults: Faults, clock: Clock) -> Transport:
    """`transport`, or `transport` behind the read faults that are set."""
    corrupt, fail, delay = (faults.trigger(point) for point in ("read.corrupt", "read.fail", "read.delay"))
    if corrupt is None and fail is None and delay is None:
        return transport
    return FaultyTransport(transport, corrupt, fail, delay, clock)


class FaultyTransport:
    """A `Transport` (engine/wire.py) whose reads go wrong. Of several faults of one read the first parameter's wins."""

    def __init__(
        self, inner: Transport, corrupt: Trigger | None, fail: Trigger | None, delay: Trigger | None, clock: Clock
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._corrupt, self._fail, self._delay = corrupt, fail, delay
        self._clock = clock
        self._slots: dict[int, int] = {}
        self._held: list[tuple[float, ReadDone]] = []
        self._staging: HostBytes = np.empty((0, 0), np.uint8)

    def register(self, pool: Bytes, staging: Bytes) -> bytes:
        if not isinstance(staging, DeviceBytes):
            self._staging = staging
        elif self._corrupt is not None:
            raise TransferError("fault point read.corrupt: the staging slots are not in host memory")
        return self._inner.register(pool, staging)

    def add_peer(self, peer: str, metadata: bytes, pool_address: int) -> None:
        self._inner.add_peer(peer, metadata, pool_address)

    def drop_peer(self, peer: str) -> None:
        self._inner.drop_peer(peer)

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        self._slots[read_id] = slot
        self._inner.read(read_id, peer, ranges, slot)

    def serve(self, on: bool) -> None:
        self._inner.serve(on)

    def poll(self) -> list[Ended]:
        """What has ended, and what was held back for long enough."""
        return [*self._due(), *(report for ended in self._inner.poll() for report in self._disturb(ended))]

    @property
    def busy(self) -> bool:
        return bool(self._held) or self._inner.busy

    def close(self) -> None:
        self._inner.close()

    def _disturb(self, ended: Ended) -> Iterator[Ended]:
        if isinstance(ended, ReadDone | ReadFailed):
            slot = self._slots.pop(ended.id)
            if isinstance(ended, ReadDone):
                yield from self._disturb_read(ended, slot)
                return
        yield ended

    def _disturb_read(self, done: ReadDone, slot: int) -> Iterator[Ended]:
        corrupt, fail, delay = _hit(self._corrupt), _hit(self._fail), _hit(self._delay)
        if corrupt is not None:
            self._staging[slot, 0] ^= 1
            yield done
        elif fail is not None:
            yield ReadFailed(done.id, "fault point read.fail")
        elif delay is not None:
            self._held.append((self._clock.now() + delay.seconds, done))
        else:
            yield done

    def _due(self) -> list[Ended]:
        now = self._clock.now()
        due = [done for at, done in self._held if at <= now]
        self._held = [(at, done) for at, done in self._held if at > now]
        return list(due)


def _hit(trigger: Trigger | None) -> FaultSpec | None:
    return None if trigger is None else trigger.hit()


def make_books(num_blocks: int, faults: Faults, routing_stride: int = 1) -> BlockBooks:
    """The books of a pool; with `allocate.fail` some reservations find no room."""
    refuse = faults.trigger("allocate.fail")
    if refuse is None:
        return BlockBooks(num_blocks, routing_stride)
    return _RefusingBooks(num_blocks, routing_stride, refuse)


class _RefusingBooks(BlockBooks):
    def __init__(self, num_blocks: int, routing_stride: int, refuse: Trigger) -> None:
        super().__init__(num_blocks, routing_stride)
        self._refuse = refuse

    def allocate(self, count: int, owner: Owner) -> list[int] | None:
        if count and self._refuse.hit() is not None:
            return None
        return super().allocate(count, owner)


async def staged(reports: AsyncIterable[Report], passed: Callable[[str], None]) -> AsyncIterator[Report]:
    """An engine's reports; once one was dealt with, `passed` hears which stage it was the end of."""
    async for report in reports:
        yield report
        if isinstance(report, StepDone):
            passed("step")
        elif isinstance(report, ReadDone):
            passed("read")
