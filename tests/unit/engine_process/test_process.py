"""The engine's threads behind an in-memory port: what a real process cannot show without waiting."""

import asyncio
import threading

import pytest

from cluster.core.clock import ManualClock
from cluster.core.digest import digest_block
from engine.channel import memory_pair
from engine.messages import Copy, CopyDone, Init, Ready, Shutdown, Step, StepDone
from engine.pool import HostMemory
from engine.process import Engine
from engine.wire import Transport
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport
from tests.unit.engine_process.tracer_spec import SPEC

TIMEOUT_S = 10.0


def make_transport(kind: str, options: dict[str, str], agent: str) -> Transport:
    return InProcessTransport(InProcessNetwork(), agent, ManualClock())


def never() -> None:
    raise AssertionError("the engine was not stuck")


async def test_an_engine_runs_on_threads_over_memory() -> None:
    channel, port = memory_pair()
    engine = Engine(port, make_transport, ManualClock(), never)
    leaving = asyncio.create_task(asyncio.to_thread(engine.serve))
    channel.send(Init("me", SPEC, 4, 8, 1, 4096, 1, True, "inprocess", {}))
    channel.send(Step(1, [], []))
    channel.send(Shutdown())
    async with asyncio.timeout(TIMEOUT_S):
        kinds = [type(report) for report in [report async for report in channel]]
        assert await leaving == 0
    assert kinds == [Ready, StepDone]


async def test_an_engine_stuck_in_a_step_is_abandoned() -> None:
    """The server hangs up while Init is still going on; nothing but the reader thread can act."""
    stuck, abandoned = threading.Event(), threading.Event()

    def hang(kind: str, options: dict[str, str], agent: str) -> Transport:
        stuck.wait(TIMEOUT_S)
        return make_transport(kind, options, agent)

    channel, port = memory_pair()
    engine = Engine(port, hang, ManualClock(), abandoned.set, leave_s=0.01)
    leaving = asyncio.create_task(asyncio.to_thread(engine.serve))
    channel.send(Init("me", SPEC, 4, 8, 1, 4096, 1, True, "inprocess", {}))
    channel.close()
    assert await asyncio.to_thread(abandoned.wait, TIMEOUT_S)
    stuck.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await leaving == 0


async def test_the_digest_is_of_the_copy_whatever_lands_in_the_slot_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that was given up may still write into its slot: what it writes after the copy is nobody's proof."""
    copied: list[bytes] = []
    real = HostMemory.copy_in

    def copy_in(memory: HostMemory, slot: int, blocks: list[int]) -> None:
        memory.staging[slot] = 7
        real(memory, slot, blocks)
        copied.extend(digest_block(memory.pool[block], memory.layout.kv_heads) for block in blocks)
        memory.staging[slot] = 9

    monkeypatch.setattr(HostMemory, "copy_in", copy_in)
    channel, port = memory_pair()
    engine = Engine(port, make_transport, ManualClock(), never)
    leaving = asyncio.create_task(asyncio.to_thread(engine.serve))
    channel.send(Init("me", SPEC, 4, 8, 1, 4096, 1, True, "inprocess", {}))
    channel.send(Copy(3, 0, [5, 2]))
    channel.send(Shutdown())
    async with asyncio.timeout(TIMEOUT_S):
        reports = [report async for report in channel]
        assert await leaving == 0
    assert len(copied) == 2
    assert reports[1:] == [CopyDone(3, copied, 0.0)]
