"""The dispatcher's core: admit, place, submit, follow to the end (DESIGN §4.3-4.5, §4.9, §4.12). Synchronous and pure.

1. `add_request` takes a place in the queue, or raises Overloaded.
2. After every input that may have made room, `_pump` places waiting requests: Submit to decode, bookings noted.
3. `on_session` takes what decode workers say; tokens become Deliver effects, each token once.
4. An attempt that ends before its request - refused, pre-empted, failed, worker lost - puts it back in the queue.
5. `Endings.finish` is the only way out: it frees place, bookings and attempt, and gives the one terminal outcome.

No clock, no sockets, no asyncio: every method takes `now` (monotonic seconds) and returns effects, to be carried out in
order.
"""

import random
from collections.abc import Iterable, Mapping

from cluster.core.config import RouterSettings, TimingSettings
from cluster.core.errors import HeadraceError, Overloaded, Unavailable
from cluster.core.protocol import PROTOCOL
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import WatchEvent
from router import lines
from router.books import Books
from router.effects import (
    CloseSession,
    CloseWatch,
    Effect,
    OpenSession,
    OpenWatch,
    ReopenSession,
    ReopenWatch,
    StreamClosed,
    StreamOpened,
)
from router.endings import Endings
from router.figures import Figures
from router.fleet import figures_of
from router.follow import Follow
from router.hearing import Hearing
from router.overview import Overview, overview
from router.patience import Patience
from router.placement import POLICIES, NoPair, Snapshot, Wait
from router.prefix_index import PrefixIndex
from router.queue import LineBounds
from router.records import RequestRecord
from router.requests import Limits, Request, Trace
from router.workers import WorkerView


class DispatcherCore:
    """All decisions of one router.

    `epoch` names this router process. Where no worker could take it, a request waits `unavailable_s` for one before it
    ends with Unavailable, and one that has begun `timing.comeback_s` (patience.py).
    `weights`: the shares of the tenants, by name, as they are whenever they are looked at.
    """

    def __init__(
        self,
        settings: RouterSettings,
        timing: TimingSettings,
        epoch: int,
        rng: random.Random,
        *,
        unavailable_s: float = 6.5,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._rng = rng
        self._resume_s = timing.resume_s / 2
        self._sessions = 0
        self._policy = POLICIES[settings.policy]()
        line = LineBounds(
            settings.queue_limit, settings.queue_tokens, settings.slo_ttft_s, {} if weights is None else weights
        )
        index = PrefixIndex(settings.prefix_index_entries)
        self._books = Books(line, timing, index, settings.debug_requests, settings.failovers_at_once)
        self._workers = self._books.workers
        self._endings = Endings(self._books, settings.max_attempts, rng)
        self._hearing = Hearing(self._books, self._endings)
        self._patience = Patience(self._books, unavailable_s, timing.comeback_s)
        self._last_tick: float | None = None

    # ---- what others may ask

    def limits(self, now: float) -> Limits:
        """What fits now. Raises Unavailable, naming why, while no pair of workers is ready."""
        return self._workers.limits(now)

    def ready(self, now: float) -> bool:
        """Whether a pair of workers is ready."""
        try:
            self._workers.limits(now)
        except Unavailable:
            return False
        return True

    def gauges(self) -> dict[str, int]:
        """Everything in use; all zero when idle."""
        return self._books.gauges()

    def counters(self) -> dict[str, int]:
        """Outcomes (one per request), attempts that ended early by reason, and oddities."""
        return dict(self._endings.counters)

    def records(self, name: str) -> list[RequestRecord]:
        """Recent requests of this id, ours or the client's, the newest first; one that runs, by our id."""
        return self._books.records_of(name)

    def overview(self, now: float) -> Overview:
        """For the dashboard."""
        return overview(self._books, now)

    def status(self, now: float) -> dict[str, object]:
        """For people and metrics (JSON-able)."""
        return {
            "epoch": f"{self._epoch:016x}",
            "ready": self.ready(now),
            "workers": self._workers.describe(now),
            "prefix_index": self._workers.index.describe(),
            "gauges": self.gauges(),
            "counters": self.counters(),
            "queue_limit": self._settings.queue_limit,
        }

    def figures(self, now: float) -> Figures:
        """For metrics: the same, with types, and all that workers tell."""
        return figures_of(self._workers, self.gauges(), self.counters(), now, ready=self.ready(now))

    def check_integrity(self) -> None:
        """Raises IntegrityError when a place, an attempt or a booking has no owner."""
        self._books.check_integrity()

    # ---- requests

    def add_request(self, request: Request, now: float, trace: Trace | None = None) -> list[Effect]:
        """Admit a request and place it if that is possible now. `trace` is filled while it runs. Raises Overloaded."""
        self._notice_gap(now)
        queue = self._books.queue
        alone = len(queue) == 0
        try:
            follow = self._books.admit(request, trace or Trace(), now)
        except Overloaded:
            lines.turned_away(request.public_id)
            self._refused()
            raise
        if follow.entry not in self._books.to_try():
            return []  # nothing has changed for those before it
        effects = self._pump(now)
        if alone and (error := queue.hopeless(request, now)) is not None:
            self._endings.finish(follow, error, now)
            effects += self._take_effects()
        return effects

    def check_room(self, tenant: str, now: float) -> None:
        """Raises Overloaded when no more requests of this tenant are taken now: that was its outcome."""
        try:
            self._books.queue.check_room(tenant, now)
        except Overloaded:
            self._refused()
            raise

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """The client is gone. Nothing is delivered for this id any more; an ended request is left alone."""
        follow = self._books.requests.get(request_id)
        if follow is None:
            return []
        self._endings.drop(follow, now)
        return self._pump(now)

    def abort(self, request_id: str, error: HeadraceError, now: float) -> list[Effect]:
        """End a request with this error, if it has not ended; for reasons that only the shell can see."""
        follow = self._books.requests.get(request_id)
        if follow is not None:
            self._endings.finish(follow, error, now)
        return self._pump(now)

    def stop(self, request_id: str, index: int, now: float) -> list[Effect]:
        """The front door found the end of this sample. Raises IndexError when there is no such sample."""
        follow = self._books.requests.get(request_id)
        if follow is None or follow.samples[index].finished:
            return []
        follow.sample_ended(follow.samples[index], now)
        self._books.queue.answers.answered(len(follow.samples[index].emitted))
        if follow.attempt is not None:
            stop = pb.StopSeq(attempt=follow.attempt.id, index=index)
            self._endings.send(follow.attempt.address, pb.FromRouter(stop_seq=stop))
        if follow.complete:
            self._endings.finish(follow, None, now)
        return self._pump(now)

    def tick(self, now: float) -> list[Effect]:
        """Let time act: deadlines, silence, patience, retries. To be called several times a second."""
        self._notice_gap(now)
        since, self._last_tick = self._last_tick, now
        if since is not None and not self._workers.ready("decode", now):
            self._books.queue.stood_still(now - since, now)
        self._workers.index.sweep()
        self._workers.forget_the_gone(now)
        for worker in self._workers.silent(now):
            self._endings.counters["workers_silent"] += 1
            self._reconnect(worker, now)
        for worker in self._workers.by_address.values():
            if worker.unreachable(now, self._resume_s):
                self._endings.lose(worker, "its session did not come back", now, blamed=not worker.watch.open)
        for follow in list(self._books.requests.values()):
            if now >= follow.deadline:
                self._endings.finish(follow, follow.too_late(), now)
        for follow in self._patience.with_nobody(now):
            self._endings.unserved(follow, "no decode worker is ready", now)
        return self._pump(now)

    def _refused(self) -> None:
        self._endings.counters["outcome_overloaded"] += 1

    # ---- workers

    def set_members(self, addresses: Iterable[str], now: float) -> list[Effect]:
        """The workers there should be, as host:port. One that left keeps its streams until its attempts have ended."""
        wanted = dict.fromkeys(addresses)
        for address in wanted:
            worker = self._workers.get(address)
            if worker is None:
                self._workers.add(address)
                self._endings.effects.append(OpenWatch(address))
            else:
                worker.member = True
        for worker in self._workers.by_address.values():
            worker.member = worker.address in wanted
        return self._pump(now)

    def on_watch(self, address: str, event: WatchEvent | StreamClosed, now: float) -> list[Effect]:
        """Something happened on the watch to this address."""
        self._notice_gap(now)
        worker = self._workers.get(address)
        if worker is None:
            return []
        if isinstance(event, StreamClosed):
            worker.watch_closed()
            return self._pump(now)
        before = worker.epoch
        taken = worker.on_watch(event, now)
        if taken and worker.facts.name:
            leaving = worker.status is not None and worker.status.draining
            self._workers.lives.heard(worker.name, worker.role, worker.epoch, now, leaving=leaving)
        if not taken:
            self._endings.counters["watch_gaps"] += 1
            worker.watch_closed()
            self._endings.effects.append(ReopenWatch(address))
        elif event.HasField("hello"):
            self._introduced(worker, before, now)
        elif not event.HasField("status"):
            return []  # cache events make no room
        return self._pump(now)

    def on_session(self, address: str, event: pb.FromDecode | StreamOpened | StreamClosed, now: float) -> list[Effect]:
        """Something happened on the session to this address."""
        self._notice_gap(now)
        worker = self._workers.get(address)
        if worker is None:
            return []
        if isinstance(event, StreamOpened):
            worker.session.open, worker.session.epoch, worker.session.last_seen = True, 0, now
            self._sessions += 1
            attempts = [f.resume() for f in self._books.running_on(worker)]
            hello = pb.RouterHello(epoch=self._epoch, session=self._sessions, protocol=PROTOCOL, attempts=attempts)
            self._endings.send(address, pb.FromRouter(hello=hello))
        elif isinstance(event, StreamClosed):
            self._session_broken(worker, event.reason, now)
        elif worker.session.open:
            worker.session.last_seen = now
            if not self._hearing.hear(worker, event, now):
                return self._take_effects()
        return self._pump(now)

    def _session_broken(self, worker: WorkerView, reason: str, now: float) -> None:
        """Its attempts wait for the next session, unless there is nobody to open one with."""
        again, usable = not worker.session.open, worker.session_ready()
        worker.session_closed()
        self._endings.counters["sessions_broken"] += usable
        if worker.session.broken_at is None:
            worker.session.broken_at = now
        if again and not worker.watch.open:
            self._endings.lose(worker, f"session closed: {reason}", now)

    def _notice_gap(self, now: float) -> None:
        """This process was frozen: nobody is to blame for silence in that time, and nobody's patience ran out in it."""
        gap = 0.0 if self._last_tick is None else now - self._last_tick
        if gap <= self._workers.suspect_s / 2:
            return
        self._last_tick = now
        self._workers.forgive(gap, now)
        self._patience.forgive(gap, now)

    def _introduced(self, worker: WorkerView, before: int, now: float) -> None:
        """A watch Hello came: the same worker again, or a new peer on a known address."""
        if worker.epoch != before:
            self._endings.lose(worker, "worker was restarted", now)
            self._books.forget_prefill(worker)
            worker.new_peer()
            if worker.session.open and worker.session.epoch not in (0, worker.epoch):
                worker.session_closed()
                self._endings.effects.append(ReopenSession(worker.address))
        wanted = worker.role == "decode" and worker.facts.shape.protocol == PROTOCOL
        if wanted and not worker.session.wanted:
            self._endings.effects.append(OpenSession(worker.address))
        elif worker.session.wanted and not wanted:
            worker.session_closed()
            self._endings.lose(worker, "no longer a decode worker", now)
            self._endings.effects.append(CloseSession(worker.address))
        worker.session.wanted = wanted

    def _reconnect(self, worker: WorkerView, now: float) -> None:
        """Silent on every stream: count it as lost and start over."""
        worker.watch_closed()
        self._endings.effects.append(ReopenWatch(worker.address))
        if worker.session.open:
            worker.session_closed()
            self._endings.effects.append(ReopenSession(worker.address))
        self._endings.lose(worker, "worker is silent", now, silent=True)

    def _retire(self) -> None:
        """Close the streams of workers that are no members any more and on which nothing runs."""
        leaving = [w for w in self._workers.by_address.values() if not w.member and not self._books.running_on(w)]
        for worker in leaving:
            self._books.forget_prefill(worker)
            if worker.session.wanted:
                self._endings.effects.append(CloseSession(worker.address))
            self._endings.effects.append(CloseWatch(worker.address))
            self._workers.remove(worker)

    # ---- placement

    def _pump(self, now: float) -> list[Effect]:
        """Place what can be placed now, retire who left, and hand out the effects."""
        while len(self._books.queue) > 0 and self._round(now):
            continue
        self._retire()
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        effects, self._endings.effects = self._endings.effects, []
        return effects

    def _round(self, now: float) -> bool:
        """Try the first of the line once. Returns whether any of them left it."""
        waiting = len(self._books.queue)
        reserved: set[str] = set()
        loads: Snapshot | None = None
        for entry in self._books.to_try():
            if now < entry.not_before:
                continue
            loads = loads or self._workers.loads(now)
            if not loads.decode:
                return False
            self._try(self._books.requests[entry.request_id], loads, reserved, now)
            if entry.request_id not in self._books.queue:
                loads = None  # a booking changed them
        return len(self._books.queue) < waiting

    def _try(self, follow: Follow, loads: Snapshot, reserved: set[str], now: float) -> None:
        """Place one waiting request, or note why not. `reserved`: workers kept free for one that waited too long."""
        may_force_local = follow.wants_local and self._books.forced_local() < len(loads.decode)
        demand = follow.demand(self._settings.local_max_tokens, may_force_local=may_force_local)
        chosen = self._policy.place(demand, self._workers.for_request(loads, follow.keys_of, reserved), self._rng)
        if isinstance(chosen, NoPair):
            why = f"no prefill worker fits a decode worker: {chosen.reason}"
            self._hopeless(follow, why, reserved, now, at_once=not follow.begun)
        elif isinstance(chosen, Wait):
            self._wait(follow, chosen, reserved, now)
        else:
            follow.tries.hopeless_since = None
            attempt = self._books.start(follow, chosen, demand, now)
            submit = follow.submit(chosen, now)
            self._endings.send(attempt.address, pb.FromRouter(submit=submit))

    def _wait(self, follow: Follow, wait: Wait, reserved: set[str], now: float) -> None:
        follow.record.waiting_for = wait.reason
        if wait.hopeless:
            self._hopeless(follow, wait.reason, reserved, now)
            return
        follow.tries.hopeless_since = None
        if wait.best is not None and self._books.queue.overdue(follow.entry, now):
            reserved.add(wait.best)

    def _hopeless(self, follow: Follow, why: str, reserved: set[str], now: float, *, at_once: bool = False) -> None:
        """Nobody who is ready could ever take it, as far as is seen: the worker it needs may be a reserved one."""
        if not reserved and (at_once or self._patience.hopeless(follow, now)):
            self._endings.unserved(follow, why, now)
