"""The server process of a prefill worker: real streams and a real engine around the pure core.

1. start the engine and wait until its memory is touched and the model is loaded
2. listen: Link for decode workers, Watch for routers
3. every event goes through the core; its effects are carried out at once
4. the engine ends, or a plan is overdue: tell everybody and leave; the supervisor starts a new life
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator

import grpc.aio

from cluster.core.clock import Clock, SystemClock
from cluster.core.faults import Faults
from cluster.core.ids import agent_name, new_epoch
from cluster.faulty import make_publisher, make_stages, make_stream
from cluster.program import ProgramContext
from cluster.rpc import make_server, service
from cluster.streams import ServerStream
from cluster.stubs import link_pb2, link_pb2_grpc
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, PrefillHello, WorkerGone
from cluster.stubs.watch_pb2 import WatchHello
from cluster.watch import WatchPublisher
from cluster.worker import Life, OwnErrors, live, make_identity, model_folder
from engine.client import EngineProcess
from engine.faults import staged
from engine.start import EngineFailed, layout_of, make_init, model_spec, start_engine
from prefill_worker.core import PrefillCore
from prefill_worker.effects import Lost, ToDecode


class PrefillServer(link_pb2_grpc.LinkServicer):
    """Carries events to the core and its effects to streams and engine."""

    def __init__(
        self, core: PrefillCore, engine: EngineProcess, publisher: WatchPublisher, clock: Clock, faults: Faults
    ) -> None:
        self._core = core
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._stages = make_stages(faults)
        self._breaks = faults.trigger("link.break")
        self._links: dict[str, ServerStream[FromDecodePeer, FromPrefill]] = {}
        self._numbers = itertools.count(1)
        self.errors = OwnErrors()
        self.lost: str | None = None

    async def Open(  # type: ignore[override]  # a coroutine that writes is allowed too
        self,
        request_iterator: AsyncIterator[FromDecodePeer],
        context: grpc.aio.ServicerContext[FromDecodePeer, FromPrefill],
    ) -> None:
        """One decode worker's link, from its hello to its end."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link starts with hello")
        name = f"{agent_name(first.hello.worker, first.hello.epoch)}#{next(self._numbers)}"
        stream = self._links[name] = make_stream(context, self._breaks, self._stages)
        try:
            with self.errors.end_this_life():
                self._core.link_opened(name, first.hello, self._clock.now())
                self.apply()
            await stream.run(request_iterator, lambda message: self._receive(name, message))
        finally:
            del self._links[name]
            with self.errors.end_this_life():
                self._core.link_closed(name, self._clock.now())
                self.apply()

    async def follow_engine(self) -> None:
        """Feed the engine's reports to the core. Raises EngineFailed when the engine is gone or given up."""
        channel = self._engine.channel
        async for report in staged(channel, self._stages.passed) if self._stages else channel:
            self._core.from_engine(report, self._clock.now())
            self.apply()
            if self.lost is not None:
                break
        reason = self.lost or f"the engine ended, exit code {await self._engine.exit_code()}"
        for stream in self._links.values():
            stream.send(FromPrefill(lost=WorkerGone(reason=reason)))
        raise EngineFailed(reason)

    def tick(self) -> None:
        self._core.tick(self._clock.now())
        self.apply()

    def drain(self) -> None:
        self._core.draining = True

    def hand_over(self) -> None:
        self._core.hand_over(self._clock.now())
        self.apply()

    def flushed(self) -> bool:
        """Whether decode workers were sent all there is for them."""
        return not any(stream.waiting for stream in self._links.values())

    def apply(self) -> None:
        """Carry out what the core wants, in order."""
        for effect in self._core.take_effects():
            if isinstance(effect, ToDecode):
                stream = self._links.get(effect.link)
                if stream is not None:
                    stream.send(effect.message)
            elif isinstance(effect, Lost):
                self.lost = effect.reason
                self._engine.kill()
            elif self.lost is None:
                self._engine.send(effect.command)
        stored, removed = self._core.books.take_events()
        self._publisher.publish_removed(removed)
        self._publisher.publish_stored(stored)

    def _receive(self, name: str, message: FromDecodePeer) -> None:
        with self.errors.end_this_life():
            self._core.from_decode(name, message, self._clock.now())
            self.apply()


async def serve(context: ProgramContext) -> None:
    """Run one life of a prefill worker until `context.stopping`. Raises EngineFailed, ConfigError, ModelError."""
    config, clock, epoch = context.config, SystemClock(), new_epoch()
    faults = config.faults_of(context.name)
    agent = agent_name(context.name, epoch)
    init = make_init(config, "prefill", agent, model_spec(config, model_folder(config), "prefill"), faults)
    engine, ready = await start_engine("prefill_worker.engine_process", init)
    try:
        layout = layout_of(ready, config.engine.block_size)
        identity = make_identity(context.name, epoch, "prefill", layout, ready.fingerprint)
        hello = PrefillHello(
            identity=identity,
            agent=agent,
            agent_metadata=ready.metadata,
            pool_address=ready.pool_address,
            block_bytes=layout.block_bytes,
            transport=ready.transport,
        )
        core = PrefillCore(config, hello, vocab_size=ready.vocab_size, max_context=ready.max_context)
        watch_hello = WatchHello(
            identity=identity,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            eos_ids=ready.eos_ids,
            num_blocks=core.books.num_blocks,
            block_size=layout.block_size,
            routing_stride=core.books.routing_stride,
        )
        publisher = make_publisher(watch_hello, core.books.routing_keys, core.status, config.timing.heartbeat_s, faults)
        worker = PrefillServer(core, engine, publisher, clock, faults)
        link = service(link_pb2.DESCRIPTOR, "Link", link_pb2_grpc.add_LinkServicer_to_server, worker)
        server = make_server(config.host, 0, [link, publisher.service()], context.credentials)
        for known in (watch_hello.identity, hello.identity):
            known.address = server.address
        life = Life(
            server=server,
            publisher=publisher,
            epoch=epoch,
            pids=(os.getpid(), engine.pid),
            tick=worker.tick,
            slept=core.slept,
            tasks=(worker.follow_engine(), worker.errors.future),
            idle=lambda: not core.jobs,
            drain=worker.drain,
            hand_over=worker.hand_over,
            flushed=worker.flushed,
        )
        await live(context, life, clock)
    finally:
        await engine.stop()
