"""What both kinds of simulated worker share: one life of a server process with its engine (cluster/worker.py).

up     listening, ticking, heartbeats
lost   the engine has ended: say so to whoever is connected - or come too late to say it - and leave
drain  no new work; leave when nothing is left, or after a while
"""

import abc
from functools import partial
from typing import Literal

from cluster.core.errors import IntegrityError
from cluster.core.ids import agent_name
from cluster.core.protocol import PROTOCOL
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.watch_pb2 import WatchHello
from decode_worker.core import DecodeCore
from engine.blocks import BlockBooks
from engine.messages import Command, Report
from engine.model.tracer import TracerModelRunner
from prefill_worker.core import PrefillCore
from simulation.engine import SimEngine
from simulation.local_engine import LocalEngine
from simulation.network import End
from simulation.process import Process
from simulation.publisher import Publisher
from simulation.site import Site, Violation
from simulation.vocabulary import tracer_vocabulary_of

TICK_S = 0.1
FROZEN_S = 1.0
DRAIN_S = 8.0
Role = Literal["prefill", "decode"]


class WorkerLife(abc.ABC):
    """One life of a worker, from ready to its end."""

    core: PrefillCore | DecodeCore

    def __init__(self, site: Site, name: str, role: Role, address: str) -> None:
        self.site = site
        self.name = name
        self.role = role
        self.address = address
        self.epoch = site.loop.random.getrandbits(64) | 1
        self.agent = agent_name(name, self.epoch)
        self.process = Process(site.loop, name, f"{name}@{address.rsplit(':', 1)[1]}")
        self.engine = SimEngine(
            self.process, self._bytes(), site.agents, site.network, site.scenario, self._from_engine
        )
        self.lost: str | None = None
        self.core = self.make_core(self.identity())
        self.publisher = Publisher(
            self.process,
            self._hello(),
            self.books().routing_keys,
            self.core.status,
            site.scenario.config.timing.heartbeat_s,
        )

    # -- what the roles differ in -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def make_core(self, identity: WorkerIdentity) -> PrefillCore | DecodeCore:
        """The brain."""

    @abc.abstractmethod
    def carry_out(self) -> None:
        """Do what the core wants, in order."""

    @abc.abstractmethod
    def accept_peer(self, end: End) -> None:
        """A stream of this role's own kind."""

    @abc.abstractmethod
    def say_lost(self, reason: str) -> None:
        """Tell everybody who is connected."""

    @abc.abstractmethod
    def start_draining(self) -> None:
        """Take no new work."""

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether nothing is left to finish."""

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, tick, beat."""
        self.site.agents[self.agent] = self.engine.wire
        self.site.listening[self.address] = self
        self._tick_later()
        self.publisher.beat()
        self.site.loop.log(f"{self.process.name} is ready, epoch {self.epoch:016x}")

    def accept(self, kind: str, end: End) -> None:
        if kind == "watch":
            self.publisher.accept(end)
        else:
            self.accept_peer(end)

    def kill(self, *, silent: bool = False) -> None:
        """SIGKILL of the server, and with it of the engine; `silent`: the whole host goes, without a word."""
        if self.process.dead:
            return
        self.site.loop.log(f"{self.process.name} dies{' with its host' if silent else ''}")
        for process in (self.process, self.engine.process):
            process.silent = silent
            process.kill()
        self.site.network.died(self.process)
        if not silent and self.site.listening.get(self.address) is self:
            del self.site.listening[self.address]
        self.site.gone(self)

    def kill_engine(self) -> None:
        """SIGKILL of the engine, or its own death."""
        if not self.engine.process.dead:
            self.site.loop.log(f"{self.engine.process.name} dies")
            self.engine.process.kill()
            self.engine.on_end(self._engine_ended)

    def drain(self) -> None:
        """SIGTERM."""
        self.start_draining()
        self.handled()
        self.publisher.publish_status()
        self._leave_when_idle(self.site.loop.now + DRAIN_S)

    def check(self) -> None:
        """Audit the core. Raises Violation."""
        try:
            self.core.check_integrity()
        except (IntegrityError, AssertionError) as error:
            raise Violation(f"I2: {self.name}: {error or 'the books disagree'}") from error

    def handled(self) -> None:
        """After every event."""
        self.carry_out()
        self.check()

    # -- inside -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def books(self) -> BlockBooks:
        """The block books of the core."""

    def _bytes(self) -> LocalEngine:
        config, loop = self.site.scenario.config, self.site.loop
        model = TracerModelRunner(self.site.scenario.model, config.engine.block_size, loop.clock, _no_sleep)
        slots = 2 * config.handoff.slots if self.role == "decode" else 1
        blocks, vocabulary = config.num_blocks(self.role), tracer_vocabulary_of(model.vocab_size)
        return LocalEngine(model, blocks, slots, config.handoff.slot_bytes, loop.clock, vocabulary)

    def identity(self) -> WorkerIdentity:
        model = self.engine.local.model
        layout = model.layout
        shape = Layout(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=layout.dtype,
        )
        return WorkerIdentity(
            worker=self.name,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            layout=shape,
            fingerprint=model.fingerprint,
            protocol=PROTOCOL,
        )

    def _hello(self) -> WatchHello:
        model = self.engine.local.model
        return WatchHello(
            identity=self.identity(),
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_ids=model.eos_ids,
            num_blocks=self.books().num_blocks,
            block_size=model.layout.block_size,
            routing_stride=self.books().routing_stride,
        )

    def _from_engine(self, report: Report) -> None:
        self.core.from_engine(report, self.site.loop.now)
        self.handled()

    def to_engine(self, command: Command) -> None:
        if self.lost is None:
            self.engine.send(command)

    def _engine_ended(self) -> None:
        """The channel has ended; the exit code is waited for, then everybody is told."""
        self.process.timer(self.site.loop.random.uniform(0.001, 0.3), self._leave)

    def _leave(self) -> None:
        if self.site.loop.chance(0.7):  # else the process is gone before the words are
            self.say_lost(self.lost or "the engine ended")
        self.kill()

    def give_up(self, reason: str) -> None:
        """The core says that this worker cannot go on."""
        self.lost = reason
        self.kill_engine()

    def _tick_later(self) -> None:
        self.process.timer(TICK_S, partial(self._tick, self.site.loop.now))

    def _tick(self, before: float) -> None:
        now = self.site.loop.now
        gap = now - before - TICK_S
        if gap > FROZEN_S:
            self.core.slept(gap)
        self.core.tick(now)
        self.handled()
        self._tick_later()

    def _leave_when_idle(self, latest: float) -> None:
        if self.idle:
            self.kill()
            return
        if self.site.loop.now >= latest:
            self.core.hand_over(self.site.loop.now)
            self.handled()
        self.process.timer(TICK_S, partial(self._leave_when_idle, latest))


def _no_sleep(_: float) -> None:
    """The engine's pace is modelled outside of the model."""
