"""The engine's threads behind an in-memory port: what a real process cannot show without waiting."""

import asyncio
import threading

from cluster.core.clock import ManualClock
from engine.channel import memory_pair
from engine.messages import Init, Ready, Shutdown, Step, StepDone
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
