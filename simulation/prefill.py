"""A simulated prefill worker: the shell of prefill_worker/server.py on in-memory streams."""

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, PrefillHello, WorkerGone
from engine.blocks import BlockBooks
from prefill_worker.core import PrefillCore
from prefill_worker.effects import Lost, ToDecode
from prefill_worker.jobs import Phase
from simulation.network import End
from simulation.site import Site, Violation
from simulation.worker import WorkerLife


class PrefillLife(WorkerLife):
    """Takes links and watches."""

    core: PrefillCore

    def __init__(self, site: Site, name: str, address: str) -> None:
        self._links: dict[str, End] = {}
        self._numbers = 0
        super().__init__(site, name, "prefill", address)

    def make_core(self, identity: WorkerIdentity) -> PrefillCore:
        local, config = self.engine.local, self.site.scenario.config
        hello = PrefillHello(
            identity=identity,
            agent=self.agent,
            agent_metadata=self.agent.encode(),
            pool_address=self.engine.wire.base,
            block_bytes=local.model.layout.block_bytes,
            transport="simulated",
        )
        return PrefillCore(config, hello, vocab_size=local.model.vocab_size, max_context=local.model.max_context)

    def books(self) -> BlockBooks:
        return self.core.books

    @property
    def idle(self) -> bool:
        return not self.core.jobs

    def start_draining(self) -> None:
        self.core.draining = True

    def accept_peer(self, end: End) -> None:
        end.received = lambda message: self._greeted(end, message)
        end.closed = lambda _: None

    def _greeted(self, end: End, message: object) -> None:
        assert isinstance(message, FromDecodePeer)
        self._numbers += 1
        name = f"{agent_name(message.hello.worker, message.hello.epoch)}#{self._numbers}"
        self._links[name] = end
        end.received = lambda more: self._heard(name, more)
        end.closed = lambda _: self._hung_up(name)
        self.core.link_opened(name, message.hello, self.site.loop.now)
        self.handled()

    def _heard(self, name: str, message: object) -> None:
        assert isinstance(message, FromDecodePeer)
        self.core.from_decode(name, message, self.site.loop.now)
        self.handled()

    def _hung_up(self, name: str) -> None:
        del self._links[name]
        self.core.link_closed(name, self.site.loop.now)
        self.handled()

    def check(self) -> None:
        super().check()
        if strangers := {job.link for job in self.core.jobs.values()} - self._links.keys():
            raise Violation(f"I2: {self.name} has jobs of links that are closed: {sorted(strangers)}")

    def unproved(self) -> list[int]:
        """Blocks whose bytes may go bad unnoticed until somebody proves them: offered, or owned by nobody."""
        books = self.core.books
        reading = {b for j in self.core.jobs.values() if j.phase is not Phase.DONE for b in j.sequence.blocks}
        return [b for b in range(books.num_blocks) if books.is_published(b) and b not in reading]

    def carry_out(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, ToDecode):
                if effect.link in self._links:
                    self._links[effect.link].send(effect.message)
            elif isinstance(effect, Lost):
                self.give_up(effect.reason)
            else:
                self.to_engine(effect.command)
        stored, removed = self.core.books.take_events()
        self.publisher.publish(stored, removed)

    def say_lost(self, reason: str) -> None:
        for end in self._links.values():
            end.send(FromPrefill(lost=WorkerGone(reason=reason)))
