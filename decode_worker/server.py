"""The server process of a decode worker: real streams and a real engine around the pure core.

1. start the engine and wait until its memory is touched and the model is loaded
2. listen: Session for routers, Watch for routers; dial Links to prefill workers
3. every event goes through the core; its effects are carried out at once
4. the engine ends, or a plan is overdue: tell everybody and leave; the supervisor starts a new life
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator

import grpc.aio

from cluster.core.clock import Clock, SystemClock
from cluster.core.faults import Faults
from cluster.core.ids import agent_name, new_epoch
from cluster.credentials import Credentials
from cluster.faulty import make_publisher, make_stages, make_stream
from cluster.program import ProgramContext
from cluster.rpc import make_server, service
from cluster.streams import ServerStream
from cluster.stubs import session_pb2, session_pb2_grpc
from cluster.stubs.common_pb2 import WorkerAddress
from cluster.stubs.link_pb2 import FromPrefill, PrefillHello
from cluster.stubs.session_pb2 import FromDecode, FromRouter, WorkerLost
from cluster.stubs.watch_pb2 import WatchHello
from cluster.watch import WatchPublisher
from cluster.worker import Life, OwnErrors, live, make_identity, model_folder
from decode_worker.core import DecodeCore
from decode_worker.effects import Dial, HangUp, Lost, ToEngine, ToPrefill, ToRouter
from decode_worker.links import LinkEvents, Links
from decode_worker.state import Facts
from engine.client import EngineProcess
from engine.faults import staged
from engine.start import EngineFailed, layout_of, make_init, model_spec, start_engine


class DecodeServer(session_pb2_grpc.SessionServicer):
    """Carries events to the core and its effects to streams, links and engine."""

    def __init__(
        self,
        core: DecodeCore,
        engine: EngineProcess,
        publisher: WatchPublisher,
        credentials: Credentials,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self._core = core
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._stages = make_stages(faults)
        self._breaks = faults.trigger("session.break")
        self._sessions: dict[str, ServerStream[FromRouter, FromDecode]] = {}
        self._numbers = itertools.count(1)
        self._flush: asyncio.TimerHandle | None = None
        received = self._link_message_and_stage if self._stages else self._link_message
        events = LinkEvents(self._link_opened, received, self._link_closed)
        self.links = Links(core.state.facts.identity, credentials, events)
        self.errors = OwnErrors()
        self.lost: str | None = None

    async def Open(  # type: ignore[override]  # a coroutine that writes is allowed too
        self, request_iterator: AsyncIterator[FromRouter], context: grpc.aio.ServicerContext[FromRouter, FromDecode]
    ) -> None:
        """One router's session, from its hello to its end."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session starts with hello")
        name = f"{first.hello.epoch:016x}#{next(self._numbers)}"
        stream = self._sessions[name] = make_stream(context, self._breaks, self._stages, _joined)
        try:
            with self.errors.end_this_life():
                newest = self._core.session_opened(name, first.hello, self._clock.now())
                self.apply()
            if not newest:
                return
            await stream.run(request_iterator, lambda message: self._receive(name, message))
        finally:
            del self._sessions[name]
            with self.errors.end_this_life():
                self._core.session_closed(name, self._clock.now())
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
        for stream in self._sessions.values():
            stream.send(FromDecode(lost=WorkerLost(reason=reason)))
        raise EngineFailed(reason)

    async def follow_members(self, context: ProgramContext) -> None:
        """Dial prefill workers as they appear, before the first request needs them."""
        async for members in context.members.updates():
            addresses = [
                WorkerAddress(worker=m.name, epoch=m.epoch, address=m.address) for m in members if m.role == "prefill"
            ]
            self._core.warm(addresses)
            self.apply()

    def tick(self) -> None:
        self._core.tick(self._clock.now())
        self.apply()

    def drain(self) -> None:
        self._core.drain(self._clock.now())
        self.apply()

    def hand_over(self) -> None:
        self._core.hand_over(self._clock.now())
        self.apply()

    def flushed(self) -> bool:
        """Whether routers and prefill workers were sent all there is for them."""
        return self._core.next_flush(self._clock.now()) is None and not any(s.waiting for s in self._sessions.values())

    def apply(self) -> None:
        """Carry out what the core wants, in order."""
        for effect in self._core.take_effects():
            if isinstance(effect, ToRouter):
                stream = self._sessions.get(effect.session)
                if stream is not None:
                    stream.send(effect.message)
            elif isinstance(effect, ToEngine):
                if self.lost is None:
                    self._engine.send(effect.command)
            elif isinstance(effect, ToPrefill):
                self.links.send(effect.peer, effect.message)
            elif isinstance(effect, Dial):
                self.links.dial(effect.peer, effect.address.address)
            elif isinstance(effect, HangUp):
                self.links.hang_up(effect.peer)
            elif isinstance(effect, Lost):
                self.lost = effect.reason
                self._engine.kill()
        stored, removed = self._core.state.books.take_events()
        self._publisher.publish_removed(removed)
        self._publisher.publish_stored(stored)
        self._flush_later()

    def _flush_later(self) -> None:
        """Wake up when the next outbox is due."""
        delay = self._core.next_flush(self._clock.now())
        if delay is not None and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(delay, self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        with self.errors.end_this_life():
            self._core.flush(self._clock.now())
            self.apply()

    def _receive(self, session: str, message: FromRouter) -> None:
        with self.errors.end_this_life():
            for each in message.batch or (message,):
                self._core.from_router(session, each, self._clock.now())
            self.apply()

    def _link_opened(self, peer: str, hello: PrefillHello) -> None:
        self._core.link_opened(peer, hello, self._clock.now())
        self.apply()

    def _link_message(self, peer: str, message: FromPrefill) -> None:
        self._core.from_prefill(peer, message, self._clock.now())
        self.apply()

    def _link_message_and_stage(self, peer: str, message: FromPrefill) -> None:
        self._link_message(peer, message)
        self._stages.passed(message.WhichOneof("message") or "")

    def _link_closed(self, peer: str, reason: str) -> None:
        self._core.link_closed(peer, reason, self._clock.now())
        self.apply()


def _joined(messages: list[FromDecode]) -> FromDecode:
    return FromDecode(batch=messages)


async def serve(context: ProgramContext) -> None:
    """Run one life of a decode worker until `context.stopping`. Raises EngineFailed, ConfigError, ModelError."""
    config, clock, epoch = context.config, SystemClock(), new_epoch()
    faults = config.faults_of(context.name)
    agent = agent_name(context.name, epoch)
    init = make_init(config, "decode", agent, model_spec(config, model_folder(config), "decode"), faults)
    engine, ready = await start_engine("decode_worker.engine_process", init)
    try:
        layout = layout_of(ready, config.engine.block_size)
        identity = make_identity(context.name, epoch, "decode", layout, ready.fingerprint, ready.sources)
        facts = Facts(identity, layout, ready.vocab_size, ready.max_context, frozenset(ready.eos_ids))
        core = DecodeCore(config, facts)
        hello = WatchHello(
            identity=identity,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            eos_ids=ready.eos_ids,
            num_blocks=core.state.books.num_blocks,
            block_size=layout.block_size,
            routing_stride=core.state.books.routing_stride,
        )
        publisher = make_publisher(hello, core.state.books.routing_keys, core.status, config.timing.heartbeat_s, faults)
        worker = DecodeServer(core, engine, publisher, context.credentials, clock, faults)
        session = service(session_pb2.DESCRIPTOR, "Session", session_pb2_grpc.add_SessionServicer_to_server, worker)
        server = make_server(config.host, 0, [session, publisher.service()], context.credentials)
        for known in (hello.identity, identity):
            known.address = server.address
        life = Life(
            server=server,
            publisher=publisher,
            epoch=epoch,
            pids=(os.getpid(), engine.pid),
            tick=worker.tick,
            slept=core.slept,
            tasks=(worker.follow_engine(), worker.follow_members(context), worker.links.failure, worker.errors.future),
            idle=lambda: core.idle,
            drain=worker.drain,
            hand_over=worker.hand_over,
            flushed=worker.flushed,
        )
        try:
            await live(context, life, clock)
        finally:
            await worker.links.close()
    finally:
        await engine.stop()
