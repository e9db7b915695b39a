"""What decode workers say on their sessions, and what it means for the attempt it is about (DESIGN §4a).

A message about an attempt that is not the present one of its request, or not on this worker, is late and
changes nothing.
"""

from cluster.core.errors import InvalidRequest, RequestFailed
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Blame, PromptLogprobs
from router import lines
from router.books import Books
from router.effects import Deliver, DeliverScores
from router.endings import LONGEST_BACKOFF_S, Endings, backoff_s
from router.follow import LOCAL, Attempt, Follow, ProtocolBreach
from router.requests import TokenEvent
from router.workers import WorkerView

_ASKED_BY_DECODE = 2  # of the list, before it answers NoPrefill
AT_ONCE_S = 0.05  # so long after it came a new request may still be told that there is no room; then it waits


class Hearing:
    """Takes FromDecode messages; acts through the books and endings."""

    def __init__(self, books: Books, endings: Endings) -> None:
        self._books = books
        self._endings = endings

    def hear(self, worker: WorkerView, event: pb.FromDecode, now: float) -> bool:
        """Take one message. Returns whether placement should look again."""
        match event.WhichOneof("message"):
            case "tokens":
                return any([self._on_run(worker, run, now) for run in event.tokens.runs])
            case "prefill_on":
                self._on_prefill(worker, event.prefill_on, now)
                return False
            case "scored":
                return self._on_scored(worker, event.scored, now)
            case "handed_off":
                self._on_handed_off(worker, event.handed_off, now)
                return False
            case "hello":
                self._on_hello(worker, event.hello.epoch)
            case "lost":
                worker.lost = True
                self._endings.lose(worker, f"worker lost: {event.lost.reason}", now)
            case "no_prefill":
                self._on_no_prefill(worker, event.no_prefill, now)
            case "refused":
                self._on_refused(worker, event.refused, now)
            case "preempted":
                self._on_preempted(worker, event.preempted, now)
            case "failed":
                self._on_failed(worker, event.failed, now)
            case "unknown":
                self._on_unknown(worker, event.unknown, now)
            case None:
                self._endings.counters["unknown_messages"] += 1
        return True

    def _find(self, worker: WorkerView, attempt_id: str) -> tuple[Follow, Attempt] | None:
        follow = self._books.attempts.get(attempt_id)
        if follow is None or follow.attempt is None or follow.attempt.address != worker.address:
            self._endings.counters["late_messages"] += 1
            return None
        return follow, follow.attempt

    def _accepted(self, worker: WorkerView, follow: Follow, attempt: Attempt, now: float) -> None:
        if attempt.accepted:
            return
        follow.accepted(now)
        follow.trace.decode_worker = worker.name
        follow.entry.blocked_since = None
        worker.health.accepted()
        self._books.acknowledge(attempt)

    def _on_hello(self, worker: WorkerView, epoch: int) -> None:
        """The session is usable if it reached the peer that the watch knows."""
        worker.session.epoch = epoch
        worker.session.broken_at = None

    def _on_prefill(self, worker: WorkerView, message: pb.PrefillOn, now: float) -> None:
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._accepted(worker, follow, attempt, now)
        if attempt.handed_off:  # said again after a break: it is over
            return
        if message.worker == LOCAL and attempt.prefill and not attempt.record.local:
            lines.fell_back(follow.record)
        follow.on_prefill(message)
        self._books.move_prefill(attempt, attempt.prefill.get(message.worker), now)
        self._books.acknowledge(attempt)

    def _on_handed_off(self, worker: WorkerView, message: pb.HandedOff, now: float) -> None:
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._accepted(worker, follow, attempt, now)
        self._books.handed_off(follow, message, now)
        self._books.computed(attempt)

    def _on_run(self, worker: WorkerView, run: pb.TokenRun, now: float) -> bool:
        """New tokens of one sample. Returns whether others may go on: it is over, or a failover has caught up."""
        found = self._find(worker, run.attempt)
        if found is None:
            return False
        follow, attempt = found
        if not attempt.computed:  # a first token came
            self._accepted(worker, follow, attempt, now)
            self._books.computed(attempt)
        catching_up = follow.entry.returning and attempt.record.first_token_ms is None
        try:
            event = follow.take(run, now)
        except ProtocolBreach as breach:
            self._breach(worker, follow, attempt, breach, now)
            return True
        if event is None:
            return False
        self._written(follow, event, now)
        self._endings.effects.append(Deliver(follow.request.request_id, event))
        if event.end is not None and follow.complete:
            self._endings.finish(follow, None, now)
            return True
        return catching_up and attempt.record.first_token_ms is not None

    def _on_scored(self, worker: WorkerView, message: PromptLogprobs, now: float) -> bool:
        """Log-probabilities of the prompt's tokens. Returns whether the attempt is over."""
        found = self._find(worker, message.attempt)
        if found is None:
            return False
        follow, attempt = found
        self._accepted(worker, follow, attempt, now)
        try:
            scores = follow.take_scores(message, worker.facts.vocab_size)
        except ProtocolBreach as breach:
            self._breach(worker, follow, attempt, breach, now)
            return True
        if scores is not None:
            self._endings.effects.append(DeliverScores(follow.request.request_id, scores))
        return False

    def _breach(self, worker: WorkerView, follow: Follow, attempt: Attempt, breach: ProtocolBreach, now: float) -> None:
        """What it said cannot be trusted, and nothing it may still say."""
        self._endings.counters["protocol_breaches"] += 1
        self._books.release(follow, f"failed: {breach}", now)
        self._endings.send(worker.address, pb.FromRouter(cancel=pb.CancelAttempt(attempt=attempt.id)))
        worker.health.failed(now)
        self._endings.failed(follow, attempt, f"{worker.name} broke the protocol: {breach}", now)

    def _written(self, follow: Follow, event: TokenEvent, now: float) -> None:
        """What admission learns from new tokens: what the request comes to, and how long such ones take."""
        if follow.tries.could_not_run and follow.is_past(follow.tries.stuck_at):
            self._endings.runs(follow, now)
        queue, request, written = self._books.queue, follow.request, follow.written
        queue.written(follow.entry, written)
        if written == len(event.ids) > 0 and follow.tries.number == 1 and follow.attempt is not None:
            queue.answers.first_token(len(request.prompt), now - follow.attempt.submitted)
        if event.end is not None and request.max_tokens:
            queue.answers.answered(len(follow.samples[event.index].emitted))

    def _on_no_prefill(self, worker: WorkerView, message: pb.NoPrefill, now: float) -> None:
        """Everything is released there. The prefill workers asked are left alone for a while."""
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._endings.counters["attempts_no_prefill"] += 1
        follow.turned_away()
        self._books.release(follow, f"no prefill: {message.reason}", now)
        self._endings.settle(attempt)
        worker.health.accepted()
        delay = min(LONGEST_BACKOFF_S, max(message.retry_after_s, backoff_s(follow.tries.no_prefill)))
        for address in list(attempt.prefill.values())[:_ASKED_BY_DECODE]:
            prefill = self._books.workers.get(address)
            if prefill is not None:
                prefill.health.paused(message.retry_after_s, now)
                follow.tries.avoid.add(prefill.epoch)
        self._endings.put_back(follow, now, delay_s=delay)

    def _on_refused(self, worker: WorkerView, message: pb.AttemptRefused, now: float) -> None:
        """No room. The worker gets nothing as large before its hint is over; another worker may get it at once."""
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._endings.counters["attempts_refused"] += 1
        self._books.release(follow, f"refused: {message.reason}", now)
        worker.free_blocks = message.free_blocks
        worker.health.refused(attempt.blocks, message.retry_after_s, now)
        if follow.entry.blocked_since is None:
            follow.entry.blocked_since = now
        self._endings.put_back(follow, now)
        if follow.request.request_id not in self._books.requests:
            return
        if message.permanent:
            text = f"the request can never be served: {message.reason}"
            self._endings.finish(follow, RequestFailed(text) if follow.begun else InvalidRequest(text), now)
            return
        error = self._books.queue.hopeless(follow.request, now) if now - follow.arrived <= AT_ONCE_S else None
        if error is not None:
            self._endings.finish(follow, error, now)  # room will come too late

    def _on_preempted(self, worker: WorkerView, message: pb.Preempted, now: float) -> None:
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._books.release(follow, "handed over" if message.draining else "preempted", now)
        self._endings.settle(attempt)
        if message.draining:
            self._endings.counters["attempts_handed_over"] += 1
            follow.tries.handed_over += 1
        else:
            self._endings.counters["attempts_preempted"] += 1
            follow.tries.preemptions += 1
        self._endings.put_back(follow, now)

    def _on_failed(self, worker: WorkerView, message: pb.AttemptFailed, now: float) -> None:
        """The worker could not go on. A client's error or deadline never counts against it (I11).

        Nor does what no worker can run (I8): it counts against those that could not as soon as another one can.
        """
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        how = {Blame.BLAME_REQUEST: "invalid", Blame.BLAME_DEADLINE: "deadline"}.get(message.blame, "failed")
        self._books.release(follow, f"{how}: {message.reason}", now)
        self._endings.settle(attempt)
        if how != "failed":
            self._endings.put_back(follow, now)
            if follow.request.request_id in self._books.requests:
                error = follow.too_late() if how == "deadline" else InvalidRequest(message.reason)
                self._endings.finish(follow, error, now)
            return
        if message.blame == Blame.BLAME_UNSETTLED:
            follow.tries.could_not_run.append(worker.epoch)
            follow.tries.stuck_at = [len(sample.emitted) for sample in follow.samples]
        else:
            worker.health.failed(now)
        self._endings.failed(follow, attempt, f"{worker.name}: {message.reason}", now)

    def _on_unknown(self, worker: WorkerView, message: pb.UnknownAttempt, now: float) -> None:
        found = self._find(worker, message.attempt)
        if found is None:
            return
        follow, attempt = found
        self._books.release(follow, "unknown to its worker", now)
        if attempt.accepted:
            self._endings.failed(follow, attempt, f"{worker.name} does not know the attempt", now, blamed=False)
        else:  # its Submit, or the refusal, was lost with the session: nothing has failed
            self._endings.counters["attempts_lost_on_the_way"] += 1
            self._endings.put_back(follow, now)
