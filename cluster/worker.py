"""What both kinds of worker share once their engine runs: identity, listening, ticking, leaving in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.config import cache_home_from_environment
from cluster.core.clock import Clock
from cluster.core.config import ClusterConfig
from cluster.core.protocol import PROTOCOL
from cluster.models.store import default_cache, resolve
from cluster.program import ProgramContext
from cluster.rpc import RpcServer
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.watch import WatchPublisher

TICK_S = 0.1
FROZEN_S = 1.0  # a tick that comes later than this was held up by us, not by those we wait for
FLUSH_S = 2.0  # for the last messages to leave, after everything has ended
_log = logging.getLogger(__name__)


def model_folder(config: ClusterConfig) -> str:
    """The folder of the model to serve, "" for the tracer. Raises ModelError when it was not fetched yet."""
    return "" if config.model == "tracer" else str(resolve(config.model, default_cache(cache_home_from_environment())))


class BlockShape(Protocol):
    """A KV layout, as far as other workers compare it."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def make_identity(
    name: str,
    epoch: int,
    role: str,
    shape: BlockShape,
    fingerprint: bytes,
    sources: Mapping[str, bytes] | None = None,
) -> WorkerIdentity:
    """What a worker says of itself. Its address is filled in once it is bound.

    `sources`: by KV dtype, the fingerprints whose blocks it converts.
    """
    layout = Layout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
    )
    return WorkerIdentity(
        worker=name,
        epoch=epoch,
        role=role,
        layout=layout,
        fingerprint=fingerprint,
        protocol=PROTOCOL,
        sources=sources,
    )


class OwnErrors:
    """Catches what our own code raises where gRPC or the event loop would only log it.

    After such an error the books may be wrong, so this life must end (cluster/core/errors.py): `future` is one of its
    tasks, and gets the first error.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextlib.contextmanager
    def end_this_life(self) -> Iterator[None]:
        """Around calls of the core, not around streams: what a peer does to its own stream is no error of ours."""
        try:
            yield
        except Exception as error:
            if not self.future.done():
                self.future.set_exception(error)
            raise


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a worker: what `live` needs to run it."""

    server: RpcServer
    publisher: WatchPublisher
    epoch: int
    pids: tuple[int, ...]
    tick: Callable[[], None]
    tasks: tuple[Awaitable[None], ...]  # run for ever, and raise when this life is over (the engine is gone)
    idle: Callable[[], bool]  # whether nothing is left to finish
    drain: Callable[[], None]  # take no new work
    hand_over: Callable[[], None]  # give back what still runs: others go on with it
    flushed: Callable[[], bool]  # whether every message for a peer has left
    slept: Callable[[float], None] = lambda _: None  # this process did not run for so many seconds


async def live(context: ProgramContext, life: Life, clock: Clock) -> None:
    """Serve until told to stop, then drain (`_drain`). Raises what a task raises."""
    await life.server.start()
    await life.server.set_serving(True)
    context.report_ready(address=life.server.address, epoch=life.epoch, pids=life.pids)
    working: list[asyncio.Future[None]] = [
        *(asyncio.ensure_future(task) for task in life.tasks),
        asyncio.ensure_future(_tick(life, clock)),
        asyncio.ensure_future(life.publisher.run()),
    ]
    stopping: asyncio.Future[None] = asyncio.ensure_future(_set(context.stopping))
    try:
        await asyncio.wait([*working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await _drain(life, clock, working, context.config.timing.drain_s)
        for task in working:
            if task.done():
                task.result()
    finally:
        for task in (*working, stopping):
            task.cancel()
        await asyncio.gather(*working, stopping, return_exceptions=True)
        await life.server.stop(0.2)


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _tick(life: Life, clock: Clock) -> None:
    """Let time act; a process that was frozen and wakes notices the gap first (DESIGN §6)."""
    while True:
        before = clock.now()
        await asyncio.sleep(TICK_S)
        gap = clock.now() - before - TICK_S
        if gap > FROZEN_S:
            _log.warning("this process did not run for %.1f s", gap)
            life.slept(gap)
        life.tick()


async def _drain(life: Life, clock: Clock, working: list[asyncio.Future[None]], drain_s: float) -> None:
    """Leave in order (DESIGN §6): no new work, let what runs end, hand over what does not within `drain_s`, flush.

    Ends early when a task of `working` does: then this life is over anyway.
    """
    _log.info("draining")
    life.drain()
    life.publisher.publish_status()
    await life.server.set_serving(False)
    if await _until(life.idle, clock, working, drain_s):
        _log.info("nothing runs any more")
    else:
        _log.warning("handing over what still runs")
        life.hand_over()
    await _until(life.flushed, clock, working, FLUSH_S)


async def _until(
    condition: Callable[[], bool], clock: Clock, working: list[asyncio.Future[None]], within_s: float
) -> bool:
    """Wait for what the core has no event for. False when the time is up or a task has ended."""
    give_up = clock.now() + within_s
    while not (holds := condition()) and clock.now() < give_up:
        ended, _ = await asyncio.wait(working, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        if ended:
            break
    return holds
