"""Who owns what in the dispatcher: places in the queue, attempts, bookings on workers. Each has exactly one owner (I2).

Every change of ownership is a method here, so that `check_integrity` can say when the books disagree.
"""

from cluster.core.config import TimingSettings
from cluster.core.errors import IntegrityError
from cluster.stubs.session_pb2 import HandedOff
from router import lines
from router.flows import Flows
from router.follow import Attempt, Follow, Phase
from router.lanes import Entry
from router.placement import Demand, Placement
from router.prefix_index import PrefixIndex
from router.queue import AdmissionQueue, LineBounds
from router.records import Records, RequestRecord, record_of
from router.requests import Request, Trace
from router.workers import Booking, Workers, WorkerView


class Books:
    """Requests by id, running attempts by id, the waiting line, and the workers with their bookings."""

    def __init__(
        self, line: LineBounds, timing: TimingSettings, index: PrefixIndex, records: int, failovers_at_once: int
    ) -> None:
        self.queue = AdmissionQueue(line)
        self.records = Records(records)
        self.flows = Flows(records)
        self.workers = Workers(timing.suspect_s, timing.heartbeat_s, index)
        self.requests: dict[str, Follow] = {}
        self.attempts: dict[str, Follow] = {}
        self._failovers_at_once = failovers_at_once

    def admit(self, request: Request, trace: Trace, now: float) -> Follow:
        """A new request, waiting. Raises Overloaded when the line is full."""
        if request.request_id in self.requests:
            raise IntegrityError(f"request id {request.request_id} is in use")
        entry = self.queue.admit(request, now)
        record = record_of(request, trace, now)
        self.records.add(record)
        follow = Follow(request, record, entry, now)
        self.requests[request.request_id] = follow
        return follow

    def records_of(self, name: str) -> list[RequestRecord]:
        """Of requests that are called so and are recent, or run: these have theirs however many came since."""
        found, running = self.records.find(name), self.requests.get(name)
        return found if found or running is None else [running.record]

    def start(self, follow: Follow, placement: Placement, demand: Demand, now: float) -> Attempt:
        """From the line to a new attempt, with its bookings on decode and, if one is expected to work, on prefill."""
        self.queue.take(follow.request.request_id, now)
        attempt = follow.start(placement, demand, now)
        self.attempts[attempt.id] = follow
        missing = placement.decode.missing(demand.tokens) if placement.local else 0
        booking = Booking(missing, attempt.blocks, len(demand.histories), demand.tokens, now)
        self.workers.by_address[attempt.address].bookings[attempt.id] = booking
        if not placement.local:
            first = placement.prefill[0]
            self._book_prefill(attempt, first.address, first.missing(demand.tokens), now)
        return attempt

    def acknowledge(self, attempt: Attempt) -> None:
        """The workers know of this attempt: their next Status includes it."""
        for address in (attempt.address, attempt.booked_prefill):
            if address is not None:
                self.workers.by_address[address].bookings[attempt.id].acknowledged = True

    def move_prefill(self, attempt: Attempt, address: str | None, now: float) -> None:
        """Another prefill worker computes the prompt; None: nobody does any more, or decode itself."""
        if attempt.booked_prefill == address:
            return
        tokens = self._end_prefill(attempt)
        if address is not None and address in self.workers.by_address:
            self._book_prefill(attempt, address, tokens, now)

    def handed_off(self, follow: Follow, message: HandedOff, now: float) -> None:
        """The figures of a hand-off; a second time, after a break, they change nothing."""
        attempt = follow.attempt
        if attempt is not None and not attempt.handed_off:
            follow.on_handed_off(message)
            pair = (attempt.record.kv_from, attempt.record.decode)
            self.flows.handed_off(pair, message.kv_bytes, message.exposed_s * 1000, now)

    def computed(self, attempt: Attempt) -> None:
        """The prompt is computed, wherever that was: nothing of it is queued any more."""
        self._end_prefill(attempt)
        attempt.computed = True
        decode = self.workers.by_address[attempt.address]
        decode.computed(decode.bookings[attempt.id])

    def release(self, follow: Follow, outcome: str, now: float) -> Attempt:
        """The attempt is over, the request is not: it is nowhere until it is put back or closed."""
        attempt = follow.leave()
        follow.record.attempt_ended(attempt.record, outcome, now)
        self.flows.attempt_ended(follow.record, outcome, now)
        lines.attempt_over(follow.record, outcome)
        self._unbook(attempt)
        return attempt

    def close(self, follow: Follow, outcome: str, now: float) -> Attempt | None:
        """The request has ended: frees all it holds. Returns the attempt that was running, if any."""
        self.queue.drop(follow.request.request_id, now)
        self.queue.settle(follow.entry, follow.written)
        attempt = follow.end()
        if attempt is not None:
            follow.record.attempt_ended(attempt.record, outcome, now)
            self._unbook(attempt)
        follow.record.ended(outcome, now)
        follow.record.written = follow.written
        del self.requests[follow.request.request_id]
        return attempt

    def running_on(self, worker: WorkerView) -> list[Follow]:
        """Requests whose present attempt runs on this decode worker."""
        return [f for f in (self.attempts[a] for a in list(worker.bookings)) if self._runs_on(f, worker.address)]

    def forget_prefill(self, worker: WorkerView) -> None:
        """This prefill worker is another peer now, or none: what was booked on it is void."""
        for attempt_id in list(worker.bookings):
            attempt = self.attempts[attempt_id].attempt
            if attempt is not None and attempt.booked_prefill == worker.address:
                self._end_prefill(attempt)

    def to_try(self) -> list[Entry]:
        """Who may be placed now, in order. A wave of those that return does not hold up all that is new."""
        if not self.queue.returning:
            return self.queue.scan()
        came_back = (f.attempt for f in self.attempts.values() if f.entry.returning)
        catching_up = sum(1 for attempt in came_back if attempt is not None and attempt.record.first_token_ms is None)
        return self.queue.scan(max(0, self._failovers_at_once - catching_up))

    def forced_local(self) -> int:
        """Attempts that decode workers prefill only because no prefill worker would."""
        return sum(1 for f in self.attempts.values() if f.attempt is not None and f.attempt.forced_local)

    def gauges(self) -> dict[str, int]:
        """Everything in use; all zero when idle."""
        return {
            "requests": len(self.requests),
            "queued": len(self.queue),
            "queued_tokens": self.queue.tokens,
            "attempts": len(self.attempts),
            "bookings": sum(len(w.bookings) for w in self.workers.by_address.values()),
        }

    def check_integrity(self) -> None:
        """Raises IntegrityError when a place, an attempt or a booking has no owner, or more than one."""
        self.queue.check_integrity()
        running = {}
        for request_id, follow in self.requests.items():
            if (follow.phase is Phase.WAITING) != (request_id in self.queue) or follow.phase is Phase.ENDED:
                raise IntegrityError(f"request {request_id} is {follow.phase.value}, but the queue disagrees")
            if (follow.phase is Phase.RUNNING) != (follow.attempt is not None):
                raise IntegrityError(f"request {request_id} is {follow.phase.value}, but its attempt disagrees")
            if follow.attempt is not None:
                running[follow.attempt.id] = follow
        if running != self.attempts or len(self.queue) + len(running) != len(self.requests):
            raise IntegrityError("attempts or places without a request")
        owned = {
            (address, f.attempt.id)
            for f in running.values()
            if f.attempt is not None
            for address in (f.attempt.address, f.attempt.booked_prefill)
            if address is not None
        }
        booked = {(w.address, attempt) for w in self.workers.by_address.values() for attempt in w.bookings}
        if owned != booked:
            raise IntegrityError(f"bookings without an attempt, or missing: {sorted(owned ^ booked)[:4]}")

    def _runs_on(self, follow: Follow, address: str) -> bool:
        return follow.attempt is not None and follow.attempt.address == address

    def _book_prefill(self, attempt: Attempt, address: str, tokens: int, now: float) -> None:
        self.workers.by_address[address].bookings[attempt.id] = Booking(tokens, 0, 0, at=now)
        attempt.booked_prefill, attempt.computed = address, False

    def _end_prefill(self, attempt: Attempt) -> int:
        """Nobody computes the prompt any more, or decode itself. Returns the positions that were booked."""
        if attempt.booked_prefill is None:
            return attempt.tokens
        tokens = self.workers.by_address[attempt.booked_prefill].unbook(attempt.id)
        attempt.booked_prefill = None
        return tokens

    def _unbook(self, attempt: Attempt) -> None:
        del self.attempts[attempt.id]
        self._end_prefill(attempt)
        self.workers.by_address[attempt.address].unbook(attempt.id)
