"""Sessions: which routers there are, what is on its way to them, and what they may ask for again (DESIGN §6).

    1. opened      a router counts its sessions: the highest number is the one that is spoken with
    2. replayed    its hello names every attempt it still wants, and how far it is: what it missed is sent again
    3. broken      attempts run on, and keep what they write and say
    4. forgotten   `timing.resume_s` later nobody will come any more: its attempts are cancelled
An attempt that has ended is remembered until its router says that it knows (`AttemptSettled`), or for LOG_S.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.core.errors import IntegrityError
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.session_pb2 import FromDecode, ResumeAttempt, RouterHello, UnknownAttempt
from decode_worker.attempts import Attempt, Sample
from decode_worker.effects import Effect, ToRouter
from decode_worker.outbox import Outbox

LOG_S = 30.0
STOPPED = -1  # as a next offset: the router has found this sample's end


@dataclass(slots=True)
class Router:
    """One life of a router. `session` is None while there is none."""

    epoch: int
    number: int
    session: str | None
    outbox: Outbox
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
        outbox = Outbox(self._emit_interval_s)
        if router is None:
            router = self._routers[hello.epoch] = Router(hello.epoch, hello.session, session, outbox)
        else:
            self._of.pop(router.session or "", None)
            router.number, router.session, router.outbox = hello.session, session, outbox
        self._of[session] = router
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
            router.outbox = Outbox(self._emit_interval_s)

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
        present = self._routers.get(router)
        if present is None or present.session is None:
            return
        waiting = present.outbox.flush(float("-inf"), force=True)
        if waiting is not None:
            self._effects.append(ToRouter(present.session, waiting))
        self._effects.append(ToRouter(present.session, message))

    def token(self, attempt: Attempt, sample: Sample) -> None:
        """The sample's newest token."""
        router = self._routers.get(attempt.router)
        if router is not None and router.session is not None:
            router.outbox.add(sample.run(attempt.id, len(sample.emitted) - 1))

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
        router = self._routers[attempt.router]
        for message in attempt.said:
            self.send(router.epoch, message)
        for sample, offset in zip(attempt.samples, wanted.next_offsets, strict=True):
            if offset != STOPPED and (offset < len(sample.emitted) or sample.end):
                router.outbox.add(sample.run(attempt.id, offset))
        if attempt.closing is not None:
            self.send(router.epoch, attempt.closing)

    def unknown(self, router: int, attempt: str) -> None:
        """There is nothing to go on with under this name."""
        self.send(router, FromDecode(unknown=UnknownAttempt(attempt=attempt)))

    def next_due(self, now: float) -> float | None:
        """When an outbox is due, or None."""
        due = [at for router in self._routers.values() if (at := router.outbox.due(now)) is not None]
        return min(due) if due else None

    def flush(self, now: float) -> None:
        """Send the outboxes whose time has come."""
        for router in self._routers.values():
            message = router.outbox.flush(now)
            if message is not None and router.session is not None:
                self._effects.append(ToRouter(router.session, message))

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
    return message.WhichOneof("message") in ("prefill_on", "handed_off")
