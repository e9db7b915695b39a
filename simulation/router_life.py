"""A simulated router: the shell of router/runtime.py on in-memory streams."""

from functools import partial

from cluster.core.errors import HeadraceError, IntegrityError, Overloaded, Unavailable
from cluster.stubs.session_pb2 import FromDecode
from cluster.stubs.watch_pb2 import WatchEvent, WatchRequest
from router.dispatcher import DispatcherCore
from router.effects import (
    CloseSession,
    CloseWatch,
    Deliver,
    DeliverScores,
    Effect,
    Finished,
    OpenSession,
    OpenWatch,
    ReopenSession,
    ReopenWatch,
    SendSession,
    StreamClosed,
    StreamOpened,
)
from simulation.calls import Call
from simulation.client import Client
from simulation.keeper import Keeper
from simulation.limits import Gatekeeper
from simulation.network import End
from simulation.process import Process
from simulation.site import Site, Violation
from simulation.turns import Turns

TICK_S = 0.1


class RouterLife:
    """One life of a router, with the clients connected to it."""

    def __init__(self, site: Site, name: str) -> None:
        self.site = site
        self.name = name
        self.process = Process(site.loop, name, name)
        config = site.scenario.config
        self.epoch = site.loop.random.getrandbits(64) | 1
        weights = {share.tenant.name: share.weight for share in site.scenario.shares}
        self.core = DispatcherCore(config.router, config.timing, self.epoch, site.loop.random, weights=weights)
        self.gate = Gatekeeper(self.process, site.limits, fail_closed=site.scenario.fail_closed)
        self.turns = Turns(site.scenario.shares, site.calm)
        self.clients: dict[str, Client] = {}
        self._calls: dict[Client, Call] = {}  # of those that have not ended
        self._watches: dict[str, Keeper] = {}
        self._sessions: dict[str, Keeper] = {}

    def accept(self, kind: str, end: End) -> None:
        """Nobody opens a stream to a router here: its clients are objects beside it."""
        raise AssertionError(f"a {kind} to {self.name}")

    def start(self) -> None:
        self.site.loop.log(f"{self.name} is up, epoch {self.epoch:016x}")
        self.gate.start()
        self._tick()

    def members(self, addresses: list[str]) -> None:
        """The supervisor's newest list."""
        self._apply(self.core.set_members(addresses, self.site.loop.now))

    def kill(self, *, silent: bool = False) -> None:
        """SIGKILL: connections of clients are reset."""
        if self.process.dead:
            return
        self.audit()
        self.site.loop.log(f"{self.name} dies{' with its host' if silent else ''}")
        self.process.silent = silent
        self.process.kill()
        self.site.network.died(self.process)
        for client in self.clients.values():
            if not client.over:
                client.outcome = "reset"
        for call in self._calls.values():
            call.ended_at = self.site.loop.now
        self.site.gone(self)

    def audit(self) -> None:
        """No worker may ever have contradicted itself, and no event of a watch may be missing. Raises Violation."""
        for oddity in ("protocol_breaches", "watch_gaps", "unknown_messages"):
            if count := self.core.counters().get(oddity, 0):
                raise Violation(f"I5: {self.name} saw {count} {oddity}")

    # -- clients ----------------------------------------------------------------------------------------------------

    def ask(self, call: Call) -> None:
        """A call has been authenticated and parsed. It takes a permit, then a place for each prompt."""
        now = self.site.loop.now
        try:
            self.core.check_room(call.tenant.name, now)
            call.held = self.gate.take(call.tenant, call.prompt_tokens)
        except (Overloaded, Unavailable) as error:
            call.error = error
            for client in call.clients:
                client.finish(error, now)
            call.ended(now)
            return
        self._calls.update(dict.fromkeys(call.clients, call))
        for client in call.clients:
            if call.error is None:
                self._admit(client)
        self._check_line()

    def in_line(self, client: Client) -> bool:
        """Whether it waits for a place, be it that it had one and lost it."""
        records = self.core.records(client.request.request_id)
        return all(attempt.ended_ms is not None for record in records for attempt in record.attempts[-1:])

    def cancel(self, call: Call) -> None:
        """The client is gone, or one of its prompts failed."""
        for client in call.clients:
            if not client.over:
                client.outcome = "cancelled"
                self._ended(client, None)
                self._apply(self.core.cancel(client.request.request_id, self.site.loop.now))

    def _admit(self, client: Client) -> None:
        self.clients[client.request.request_id] = client
        self.turns.arrived(client, self.site.loop.now)
        try:
            effects = self.core.add_request(client.request, self.site.loop.now, client.trace)
        except Overloaded as error:
            client.finish(error, self.site.loop.now)
            self._ended(client, error)
            return
        self._apply(effects)

    def _ended(self, client: Client, error: HeadraceError | None) -> None:
        """One prompt of a call has its outcome."""
        call = self._calls.pop(client)
        if error is not None and call.error is None:
            call.error = error
            self.process.timer(0.0, partial(self.cancel, call))
        if call.over:
            call.ended(self.site.loop.now)
            self.gate.ended()
            self.check_permits()

    def check_permits(self) -> None:
        """Raises Violation unless there is a permit for each call that runs, and no other."""
        running = sum(not call.tenant.quota.unlimited for call in set(self._calls.values()))
        if self.gate.permits.held() != running:
            raise Violation(f"I2: {self.name} holds {self.gate.permits.held()} permits for {running} calls")

    def _check_line(self) -> None:
        """Beyond its bound the line holds only requests that came back. Raises Violation."""
        came_back = sum(client.placed and not client.over for client in self._calls)
        if self.core.gauges()["queued"] > self.site.scenario.config.router.queue_limit + came_back:
            raise Violation(f"I3: {self.core.gauges()['queued']} requests wait at {self.name}")

    def _stop(self, client: Client, index: int) -> None:
        """The front door has found the end of this sample in its text."""
        if not client.over and index not in client.ends:
            client.stopped.add(index)
            self._apply(self.core.stop(client.request.request_id, index, self.site.loop.now))

    def _deliver(self, effect: Deliver) -> None:
        client = self.clients[effect.request_id]
        index = effect.event.index
        if index in client.stopped:
            raise Violation(f"I4: {effect.request_id}[{index}] gets tokens after it was stopped")
        client.take(effect.event, self.site.loop.now)
        wanted = client.wish.stop_at.get(index)
        if wanted is not None and len(client.got[index]) >= wanted:
            self.process.timer(self.site.loop.random.choice((0.0, 0.05)), partial(self._stop, client, index))

    def _finished(self, request_id: str, error: HeadraceError | None) -> None:
        client = self.clients[request_id]
        client.finish(error, self.site.loop.now)
        client.excused_s += self.process.frozen_s
        if isinstance(error, Unavailable) and self.core.ready(self.site.loop.now):
            raise Violation(f"I3: {request_id} ends with {error}, though a pair of workers is ready")
        self.site.loop.log(f"{self.name}: {request_id} ends: {client.outcome} {error or ''}")
        self._ended(client, error)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._apply(self.core.tick(self.site.loop.now))
        self.process.timer(TICK_S, self._tick)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        self.turns.look(self.site.loop.now)
        try:
            self.core.check_integrity()
        except IntegrityError as error:
            raise Violation(f"I2: {self.name}: {error}") from error

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendSession(address, message):
                self._sessions[address].send(message)
            case Deliver():
                self._deliver(effect)
            case DeliverScores(request_id, scores):
                self.clients[request_id].hear(scores, self.site.loop.now)
            case Finished(request_id, error):
                self._finished(request_id, error)
            case OpenWatch(address):
                self._watches[address] = self._keeper("watch", address)
                self._watches[address].open()
            case OpenSession(address):
                self._sessions[address] = self._keeper("session", address)
                self._sessions[address].open()
            case ReopenWatch(address):
                self._watches[address].reopen()
            case ReopenSession(address):
                self._sessions[address].reopen()
            case CloseWatch(address):
                self._watches.pop(address).close()
            case CloseSession(address):
                self._sessions.pop(address).close()

    def _keeper(self, kind: str, address: str) -> Keeper:
        on_event = self._on_watch if kind == "watch" else self._on_session
        opened = partial(self._watch_opened, address) if kind == "watch" else partial(self._session_opened, address)
        return Keeper(
            self.site,
            self.process,
            address,
            kind,
            opened,
            lambda message: on_event(address, message),
            lambda event: on_event(address, event),
        )

    def _watch_opened(self, _: str, end: End) -> None:
        end.send(WatchRequest(router_epoch=self.epoch))

    def _session_opened(self, address: str, _: End) -> None:
        self._on_session(address, StreamOpened())

    def _on_watch(self, address: str, event: object) -> None:
        assert isinstance(event, WatchEvent | StreamClosed)
        self._apply(self.core.on_watch(address, event, self.site.loop.now))

    def _on_session(self, address: str, event: object) -> None:
        assert isinstance(event, FromDecode | StreamOpened | StreamClosed)
        self._apply(self.core.on_session(address, event, self.site.loop.now))
