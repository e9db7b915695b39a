"""A simulated decode worker: the shell of decode_worker/server.py and decode_worker/links.py on in-memory streams."""

from functools import partial

from cluster.stubs.common_pb2 import WorkerAddress, WorkerIdentity
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill
from cluster.stubs.session_pb2 import FromDecode, FromRouter, WorkerLost
from decode_worker.core import DecodeCore
from decode_worker.effects import Dial, HangUp, Lost, ToPrefill, ToRouter
from decode_worker.state import Facts
from engine.blocks import BlockBooks
from simulation.network import End
from simulation.site import Site
from simulation.worker import WorkerLife

HELLO_TIMEOUT_S = 5.0  # as in decode_worker/links.py
_AGAIN_S = 0.1


class DecodeLife(WorkerLife):
    """Takes sessions and watches, dials links."""

    core: DecodeCore

    def __init__(self, site: Site, name: str, address: str) -> None:
        self._sessions: dict[str, End] = {}
        self._numbers = 0
        self._links: dict[str, End | None] = {}  # None while dialling
        self._dials: dict[str, int] = {}  # peer -> which dial is the present one
        self._greeted_by: set[str] = set()
        self._flushing = False
        super().__init__(site, name, "decode", address)

    def make_core(self, identity: WorkerIdentity) -> DecodeCore:
        model = self.engine.local.model
        facts = Facts(identity, model.layout, model.vocab_size, model.max_context, frozenset(model.eos_ids))
        return DecodeCore(self.site.scenario.config, facts)

    def books(self) -> BlockBooks:
        return self.core.state.books

    @property
    def idle(self) -> bool:
        return self.core.idle

    def start_draining(self) -> None:
        self.core.drain(self.site.loop.now)

    def members(self, prefill: list[WorkerAddress]) -> None:
        """The supervisor's newest list."""
        self.core.warm(prefill)
        self.handled()

    # -- sessions ---------------------------------------------------------------------------------------------------

    def accept_peer(self, end: End) -> None:
        end.received = lambda message: self._greeted(end, message)
        end.closed = lambda _: None

    def _greeted(self, end: End, message: object) -> None:
        assert isinstance(message, FromRouter)
        self._numbers += 1
        name = f"{message.hello.epoch:016x}#{self._numbers}"
        self._sessions[name] = end
        end.received = lambda more: self._heard(name, more)
        end.closed = lambda _: self._left(name)
        if not self.core.session_opened(name, message.hello, self.site.loop.now):
            del self._sessions[name]
            end.close("a newer session is open")
        self.handled()

    def _heard(self, name: str, message: object) -> None:
        assert isinstance(message, FromRouter)
        self.core.from_router(name, message, self.site.loop.now)
        self.handled()

    def _left(self, name: str) -> None:
        del self._sessions[name]
        self.core.session_closed(name, self.site.loop.now)
        self.handled()

    # -- links ------------------------------------------------------------------------------------------------------

    def _dial(self, peer: str, address: str) -> None:
        self._dials[peer] = number = self._dials.get(peer, 0) + 1
        self._links[peer] = None
        deadline = self.site.loop.now + HELLO_TIMEOUT_S
        self.process.timer(self.site.network.latency(), partial(self._try, peer, address, number, deadline))

    def _current(self, peer: str, number: int) -> bool:
        return self._dials.get(peer) == number and peer in self._links

    def _try(self, peer: str, address: str, number: int, deadline: float) -> None:
        if not self._current(peer, number):
            return
        server = self.site.reach(self.process, address)
        if server is not None:
            stream = self.site.network.connect("link", self.process, server.process)
            end = self._links[peer] = stream.client
            end.received = partial(self._link_said, peer, number)
            end.closed = partial(self._link_closed, peer, number)
            server.accept("link", stream.server)
            end.send(FromDecodePeer(hello=self.core.state.facts.identity))
            self.process.timer(max(0.0, deadline - self.site.loop.now), partial(self._no_hello, peer, number))
        elif self.site.refuses(self.process, address):
            self._link_closed(peer, number, "UNAVAILABLE: connection refused")
        elif self.site.loop.now >= deadline:
            self._link_closed(peer, number, "no hello within 5 s")
        else:
            self.process.timer(_AGAIN_S, partial(self._try, peer, address, number, deadline))

    def _link_said(self, peer: str, number: int, message: object) -> None:
        assert isinstance(message, FromPrefill)
        if not self._current(peer, number):
            return
        now, kind = self.site.loop.now, message.WhichOneof("message")
        if kind == "hello":
            self._greeted_by.add(peer)
            self.core.link_opened(peer, message.hello, now)
        elif kind == "lost":
            self._link_closed(peer, number, message.lost.reason)
            return
        else:
            self.core.from_prefill(peer, message, now)
        self.handled()

    def _no_hello(self, peer: str, number: int) -> None:
        if self._current(peer, number) and peer not in self._greeted_by:
            self._link_closed(peer, number, "no hello within 5 s")

    def _link_closed(self, peer: str, number: int, reason: str) -> None:
        if not self._current(peer, number):
            return
        self._hang_up(peer)
        self.core.link_closed(peer, reason, self.site.loop.now)
        self.handled()

    def _hang_up(self, peer: str) -> None:
        end = self._links.pop(peer, None)
        self._greeted_by.discard(peer)
        if end is not None:
            end.close("hung up")

    # -- effects ----------------------------------------------------------------------------------------------------

    def unproved(self) -> list[int]:
        """Cached blocks that nobody uses now: their bytes may go bad unnoticed until they are matched again."""
        state = self.core.state
        used = {b for a in state.attempts.values() for s in a.sequences() for b in s.blocks}
        return [b for b in range(state.books.num_blocks) if state.books.is_published(b) and b not in used]

    def carry_out(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, ToRouter):
                if effect.session in self._sessions:
                    self._sessions[effect.session].send(effect.message)
            elif isinstance(effect, ToPrefill):
                link = self._links.get(effect.peer)
                if link is not None:
                    link.send(effect.message)
            elif isinstance(effect, Dial):
                self._dial(effect.peer, effect.address.address)
            elif isinstance(effect, HangUp):
                self._hang_up(effect.peer)
            elif isinstance(effect, Lost):
                self.give_up(effect.reason)
            else:
                self.to_engine(effect.command)
        stored, removed = self.core.state.books.take_events()
        self.publisher.publish(stored, removed)
        self._flush_later()

    def _flush_later(self) -> None:
        delay = self.core.next_flush(self.site.loop.now)
        if delay is not None and not self._flushing:
            self._flushing = True
            self.process.timer(delay, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.core.flush(self.site.loop.now)
        self.handled()

    def say_lost(self, reason: str) -> None:
        for end in self._sessions.values():
            end.send(FromDecode(lost=WorkerLost(reason=reason)))
