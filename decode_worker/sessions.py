"""Sessions: which routers there are, what is on its way to them, and what they may ask for again (DESIGN §6).

    1. opened      a router counts its sessions: the highest number is the one that is spoken with
    2. replayed    its hello names every attempt it still wants, and how far it is: what it missed is sent again
    3. broken      attempts run on, and keep what they write and say
    4. forgotten   `timing.resume_s` later nobody will come any more: its attempts are cancelled
An attempt that has ended is remembered until its router says that it knows (`AttemptSettled`), or for LOG_S.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cluster.core.errors import IntegrityError
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.session_pb2 import FromDecode, ResumeAttempt, RouterHello, UnknownAttempt
from decode_worker.attempts import Attempt, Sample
from decode_worker.effects import Effect, ToRouter
from decode_worker.outbox import Outbox

LOG_S = 30.0
STOPPED = -1  # as a next offset: the router has found this sample's end


@dataclass(frozen=True, slots=True)
class Session:
    """One connection of a router, and the tokens that wait to go out on it."""

    name: str
    outbox: Outbox


@dataclass(slots=True)
class Router:
    """One life of a router. `session` is None while it has none; `number` is that of its newest."""

    epoch: int
    number: int = 0
    session: Session | None = None
    broken_at: float = 0.0
    ended: dict[str, Attempt] = field(default_factory=dict)


class Sessions:
    """Everything that goes to routers goes through here."""

    def __init__(self, identity: WorkerIdentity, effects: list[Effect], *, emit_interval_s: float) -> None:
        self._identity = identity
        self._effects = effects
        self._emit_interval_s = emit_interval_s
        self._routers: dict[int, Router] = {}
        self._of: dict[str, Router] = {}

    def opened(self, session: str, hello: RouterHello) -> bool:
        """A session's first message. False: a newer one is open already, this one is not listened to."""
        router = self._routers.get(hello.epoch)
        if router is not None and hello.session <= router.number:
            return False
        if router is None:
            router = self._routers[hello.epoch] = Router(hello.epoch)
        if router.session is not None:
            del self._of[router.session.name]
        self._of[session] = router
        router.number, router.session = hello.session, Session(session, Outbox(self._emit_interval_s))
        self._effects.append(ToRouter(session, FromDecode(hello=self._identity)))
        return True

    def router_of(self, session: str) -> int | None:
        """The router that is spoken with on this session; None when it has a newer one."""
        router = self._of.get(session)
        return None if router is None else router.epoch

    def closed(self, session: str, now: float) -> None:
        """The router or the connection is gone: it may come back for what its attempts write meanwhile."""
        router = self._of.pop(session, None)
        if router is not None:
            router.session, router.broken_at = None, now

    def gone(self, now: float, patience_s: float) -> list[int]:
        """Routers that did not come back in time. They are forgotten; so are ends that nobody asked for."""
        for router in self._routers.values():
            router.broken_at = min(router.broken_at, now)  # `slept` may count a break that came after the sleep
            for attempt in list(router.ended.values()):
                attempt.kept_until = attempt.kept_until or now + LOG_S
                if now > attempt.kept_until:
                    del router.ended[attempt.id]
        gone = [r.epoch for r in self._routers.values() if r.session is None and now - r.broken_at > patience_s]
        for epoch in gone:
            del self._routers[epoch]
        return gone

    def slept(self, seconds: float) -> None:
        """This process did not run: nobody could come back in that time."""
        for router in self._routers.values():
            router.broken_at += seconds

    def send(self, router: int, message: FromDecode) -> None:
        """After any tokens that wait. Without a session it is lost, but for what its attempt keeps."""
        session = self._session(router)
        if session is None:
            return
        waiting = session.outbox.flush(float("-inf"), force=True)
        if waiting is not None:
            self._effects.append(ToRouter(session.name, waiting))
        self._effects.append(ToRouter(session.name, message))

    def token(self, attempt: Attempt, sample: Sample) -> None:
        """The sample's newest token."""
        session = self._session(attempt.router)
        if session is not None:
            session.outbox.add(sample.run(attempt.id, len(sample.emitted) - 1))

    def end(self, attempt: Attempt, sample: Sample) -> None:
        """The sample's end, which came with no token."""
        session = self._session(attempt.router)
        if session is not None:
            session.outbox.add(sample.run(attempt.id, len(sample.emitted)))

    def ended(self, attempt: Attempt) -> None:
        """Remember what it wrote: a session may break before its router has read it."""
        router = self._routers.get(attempt.router)
        if router is not None:
            router.ended[attempt.id] = attempt

    def settle(self, router: int, attempt: str) -> None:
        """Its router knows the end."""
        present = self._routers.get(router)
        if present is not None:
            present.ended.pop(attempt, None)

    def settle_others(self, router: int, wanted: set[str]) -> None:
        """Its router has named all that it still wants."""
        present = self._routers[router]
        present.ended = {name: attempt for name, attempt in present.ended.items() if name in wanted}

    def find_ended(self, router: int, attempt: str) -> Attempt | None:
        """An attempt that ended, if it is still remembered."""
        return self._routers[router].ended.get(attempt)

    def replay(self, attempt: Attempt, wanted: ResumeAttempt) -> None:
        """Send what the router has not read: all that was said of the attempt, and the tokens from its offsets on."""
        session = self._session(attempt.router)
        if session is None:
            return
        for message in attempt.said:
            if message.scored.start >= wanted.next_scored or not message.HasField("scored"):
                self.send(attempt.router, message)
        for sample, offset in zip(attempt.samples, wanted.next_offsets, strict=True):
            if offset != STOPPED and (offset < len(sample.emitted) or sample.end):
                session.outbox.add(sample.run(attempt.id, offset))
        if attempt.closing is not None:
            self.send(attempt.router, attempt.closing)

    def unknown(self, router: int, attempt: str) -> None:
        """There is nothing to go on with under this name."""
        self.send(router, FromDecode(unknown=UnknownAttempt(attempt=attempt)))

    def next_due(self, now: float) -> float | None:
        """When an outbox is due, or None."""
        due = [at for session in self._open() if (at := session.outbox.due(now)) is not None]
        return min(due) if due else None

    def flush(self, now: float) -> None:
        """Send the outboxes whose time has come."""
        for session in self._open():
            message = session.outbox.flush(now)
            if message is not None:
                self._effects.append(ToRouter(session.name, message))

    def check_integrity(self, attempts: Iterable[Attempt]) -> None:
        """Every attempt belongs to a router that is known. Raises IntegrityError."""
        if strangers := {a.router for a in attempts} - self._routers.keys():
            raise IntegrityError(f"attempts of routers that are forgotten: {sorted(strangers)}")

    @property
    def owed(self) -> bool:
        """Whether a router whose session is broken may still come back for something."""
        return any(router.ended for router in self._routers.values() if router.session is None)

    @property
    def unsettled(self) -> int:
        """Attempts that ended, and whose router has not said that it knows."""
        return sum(len(router.ended) for router in self._routers.values())

    def _session(self, router: int) -> Session | None:
        known = self._routers.get(router)
        return None if known is None else known.session

    def _open(self) -> Iterator[Session]:
        return (router.session for router in self._routers.values() if router.session is not None)


def can_replay(attempt: Attempt, wanted: ResumeAttempt) -> bool:
    """Whether these offsets lie within what this attempt has written."""
    offsets = wanted.next_offsets
    return len(offsets) == len(attempt.samples) and all(
        at == STOPPED or sample.history <= at <= len(sample.emitted)
        for sample, at in zip(attempt.samples, offsets, strict=True)
    )


def closes(message: FromDecode) -> bool:
    """Whether it is the last word on its attempt."""
    return message.WhichOneof("message") in ("no_prefill", "failed", "preempted")


def kept(message: FromDecode) -> bool:
    """Whether a router that missed it wants to hear it later."""
    return message.WhichOneof("message") in ("prefill_on", "handed_off", "scored")
