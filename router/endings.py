"""How attempts and requests end: back to the queue, or out with the one terminal outcome (DESIGN §4.12, §6).

Collects the effects and counters of the dispatcher's core. An outcome is counted exactly once per request (FAULTS O07).
"""

import random
from collections import Counter

from cluster.core.errors import (
    BrokenOff,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from cluster.stubs import session_pb2 as pb
from router import lines
from router.books import Books
from router.effects import Deliver, Effect, Finished, SendSession
from router.follow import Attempt, Follow
from router.workers import WorkerView

LONGEST_BACKOFF_S = 2.0
_FIRST_BACKOFF_S = 0.05
_OUTCOMES: tuple[tuple[type[HeadraceError], str], ...] = (
    (InvalidRequest, "invalid"),
    (Overloaded, "overloaded"),
    (DeadlineExceeded, "deadline"),
    (Unavailable, "unavailable"),
    (RequestFailed, "failed"),
)


class Endings:
    """Ends things in the books, and says so to workers and clients."""

    def __init__(self, books: Books, max_attempts: int, rng: random.Random) -> None:
        self._books = books
        self._max_attempts = max_attempts
        self._rng = rng
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()

    def send(self, address: str, message: pb.FromRouter) -> None:
        """To a decode worker whose session is up. To another nothing is sent: its attempts are lost already."""
        worker = self._books.workers.get(address)
        if worker is not None and worker.session.open:
            self.effects.append(SendSession(address, message))

    def finish(self, follow: Follow, error: HeadraceError | None, now: float) -> None:
        """The terminal outcome: None is success. Stops what still runs."""
        name = "ok" if error is None else next(name for kind, name in _OUTCOMES if isinstance(error, kind))
        attempt = self._books.close(follow, name if error is None else f"{name}: {error}", now)
        if attempt is not None and error is None:
            self.runs(follow, now)
            self.settle(attempt)
            self._books.workers.by_address[attempt.address].health.succeeded()
        elif attempt is not None:
            self.send(attempt.address, pb.FromRouter(cancel=pb.CancelAttempt(attempt=attempt.id)))
        self.counters[f"outcome_{name}"] += 1
        if error is not None:
            lines.request_over(follow.record, name)
        self.effects.append(Finished(follow.request.request_id, error))

    def drop(self, follow: Follow, now: float) -> None:
        """The client is gone: the same, but nobody is left to be told."""
        attempt = self._books.close(follow, "cancelled", now)
        if attempt is not None:
            self.send(attempt.address, pb.FromRouter(cancel=pb.CancelAttempt(attempt=attempt.id)))
        self.counters["outcome_cancelled"] += 1

    def runs(self, follow: Follow, now: float) -> None:
        """The request can be served, so every worker that could not run it has a fault of its own."""
        guilty, follow.tries.could_not_run = follow.tries.could_not_run, []
        for worker in self._books.workers.by_address.values() if guilty else ():
            if worker.epoch in guilty:
                worker.health.failed(now)

    def unserved(self, follow: Follow, why: str, now: float) -> None:
        """Nobody can go on with it. What was streamed, if it was, stays right but incomplete (I4)."""
        self.finish(follow, BrokenOff(why) if follow.begun else Unavailable(why), now)

    def settle(self, attempt: Attempt) -> None:
        """The worker may forget this attempt's token log."""
        self.send(attempt.address, pb.FromRouter(ended=pb.AttemptSettled(attempt=attempt.id)))

    def put_back(self, follow: Follow, now: float, *, delay_s: float = 0.0) -> None:
        """A released request waits again; not before `delay_s` (drawn +-25 %) are over."""
        for event in follow.exhausted():
            self.effects.append(Deliver(follow.request.request_id, event))
        tries = follow.tries
        returning = tries.failures + tries.lost + tries.silenced + tries.preemptions + tries.handed_over > 0
        tries.waiting_since = now
        not_before = now + delay_s * self._rng.uniform(0.75, 1.25)
        self._books.queue.put_back(follow.entry, now, returning=returning, not_before=not_before)
        if follow.complete:
            self.finish(follow, None, now)

    def failed(
        self, follow: Follow, attempt: Attempt, why: str, now: float, *, blamed: bool = True, silent: bool = False
    ) -> None:
        """A released request whose attempt failed: another one, on another worker if there is one, or the end.

        Not `blamed`: a connection was lost, the worker may be well; such an attempt is none of max_attempts. Nor is one
        that was lost because its worker fell `silent`, as a machine does that is frozen for a while, if the request got
        on since it last failed: it is no reason why the next worker should. One that ends its worker's process, or has
        nothing to show for it, is bounded (I8).
        """
        self.counters["attempts_failed"] += 1
        tries = follow.tries
        excused = silent and follow.got > tries.got_at_loss
        tries.got_at_loss = follow.got
        tries.failures += blamed and not excused
        tries.lost += not blamed
        tries.silenced += excused
        tries.avoid.add(attempt.epoch)
        follow.entry.blocked_since = None
        # Lost for the first time: at once. Who loses it again and again is not asked in a hot loop.
        delay_s = 0.0 if blamed or tries.lost == 1 else backoff_s(tries.lost)
        self.put_back(follow, now, delay_s=delay_s)
        if tries.failures >= self._max_attempts and follow.request.request_id in self._books.requests:
            text = f"{tries.failures} attempts failed, the last one: {why}"
            if len(tries.could_not_run) == tries.failures and len(set(tries.could_not_run)) > 1:
                # One repeats the other: it is the request, and to ask again later is of no use.
                self.finish(follow, RequestFailed(text), now)
            else:
                self.unserved(follow, text, now)

    def lose(self, worker: WorkerView, why: str, now: float, *, blamed: bool = True, silent: bool = False) -> None:
        """Every attempt on this decode worker is lost. Should it come back as the same peer, its hello cancels them.

        A session that is open already was greeted with a hello that may have named them: there they are cancelled.
        """
        lost = self._books.running_on(worker)
        if lost and blamed:
            worker.health.failed(now)
        for follow in lost:
            attempt = self._books.release(follow, f"lost: {why}", now)
            self.send(worker.address, pb.FromRouter(cancel=pb.CancelAttempt(attempt=attempt.id)))
            self.failed(follow, attempt, why, now, blamed=blamed, silent=silent)


def backoff_s(times: int) -> float:
    """How long a request waits that had to come back so many times: doubled each time, bounded."""
    return min(LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(times, 6))
