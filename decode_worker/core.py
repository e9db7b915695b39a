"""The decode worker's brain: pure, synchronous, no clock, no sockets (DESIGN §2, "the server decides").

Every method takes an event and the time; what has to be done comes out of `take_effects`. The same code runs behind
real gRPC streams and in simulation. A request's way through here:
    1. Submit      check, match the prefix index, reserve, or wait in a short line, or refuse  (admission.py)
    2. Digest      prefix hits are proved before they are used
    3. hand-off    a prefill worker computes, blocks are read, verified, published              (handoffs.py)
    4. local       what no prefill worker supplies is computed here, in chunks
    5. decode      one token a step, until EOS, a stop token, max_tokens or the context ends    (decoding.py)
    6. end         everything the attempt owned is free again
"""

from cluster.core.config import ClusterConfig
from cluster.core.handoff_ends import LocalReason
from cluster.stubs.common_pb2 import Blame, WorkerAddress
from cluster.stubs.link_pb2 import FromPrefill, PrefillHello
from cluster.stubs.session_pb2 import (
    FromDecode,
    FromRouter,
    HandedOff,
    NoPrefill,
    Offered,
    PrefillOn,
    ResumeAttempt,
    RouterHello,
)
from cluster.stubs.watch_pb2 import Status
from decode_worker import lines
from decode_worker.admission import Admission
from decode_worker.attempts import Attempt, Phase
from decode_worker.decoding import Decoding
from decode_worker.effects import Effect, Lost
from decode_worker.handoffs import Callbacks, HandOffs
from decode_worker.peers import Peers
from decode_worker.sessions import STOPPED, can_replay
from decode_worker.state import Facts, State
from decode_worker.status import make_status
from decode_worker.transfer import Transfer
from engine.batcher import Batcher
from engine.faults import make_books
from engine.messages import (
    CopyDone,
    DigestDone,
    Fatal,
    PeerAdded,
    PeerFailed,
    Prepared,
    ReadDone,
    ReadFailed,
    Report,
    StepDone,
)
from engine.overdue import OverdueWatch
from engine.scheduler import StepBudget
from kv_transfer.staging import Staging


class DecodeCore:
    """One decode worker."""

    def __init__(self, config: ClusterConfig, facts: Facts) -> None:
        faults = config.faults_of(facts.identity.worker)
        books = make_books(config.num_blocks("decode"), faults, config.routing_stride)
        engine = config.engine
        budget = StepBudget(config.chunk_tokens("decode"), engine.max_batch, engine.local_share)
        batcher = Batcher(books, facts.layout.block_size, budget, make_room=lambda s: self._decoding.make_room(s))
        self.state = State(config, facts, books, batcher, Staging(config.handoff.slots))
        self.peers = Peers(self.state)
        callbacks = Callbacks(
            lambda attempt, first: self._decoding.remote_first(attempt, first),
            self._settled,
            self._no_prefill,
            self._failed,
            lambda attempt, message: self._decoding.scored(attempt, message),
            self._doubted,
        )
        self.handoffs = HandOffs(self.state, self.peers, callbacks)
        self._decoding = Decoding(self.state, self.peers, self.handoffs)
        self._admission = Admission(self.state, self._admitted, self._failed, self._doubted)
        self._overdue = OverdueWatch()
        self._awaited: set[int] = set()

    # -- routers --------------------------------------------------------------------------------------------------

    def session_opened(self, session: str, hello: RouterHello, now: float) -> bool:
        """A router is here, or here again. False: this session is older than another of the same router."""
        sessions = self.state.sessions
        if not sessions.opened(session, hello):
            return False
        wanted = {w.attempt: w for w in hello.attempts}
        for attempt in [a for a in self._attempts_of(hello.epoch) if a.id not in wanted]:
            self._cancel(attempt)
        sessions.settle_others(hello.epoch, set(wanted))
        for resume in wanted.values():
            self._resume(hello.epoch, resume)
        self._after(now)
        return True

    def session_closed(self, session: str, now: float) -> None:
        """The router or the connection is gone. Its attempts run on until `tick` says that nobody will come back."""
        self.state.sessions.closed(session, now)

    def from_router(self, session: str, message: FromRouter, now: float) -> None:
        router = self.state.sessions.router_of(session)
        if router is None:
            return
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._admission.submit(router, message.submit, now)
        elif kind == "cancel":
            attempt = self._own(router, message.cancel.attempt)
            if attempt is not None:
                self._cancel(attempt)
            self.state.sessions.settle(router, message.cancel.attempt)
        elif kind == "stop_seq":
            attempt = self._own(router, message.stop_seq.attempt)
            if attempt is not None:
                self._decoding.stop_sample(attempt, message.stop_seq.index)
        elif kind == "ended":
            self.state.sessions.settle(router, message.ended.attempt)
        self._after(now)

    # -- prefill workers ------------------------------------------------------------------------------------------

    def link_opened(self, peer_name: str, hello: PrefillHello, now: float) -> None:
        reason = self.peers.opened(peer_name, hello)
        peer = self.peers.get(peer_name)
        if peer is not None and reason is not None:
            self.handoffs.link_down(peer, reason, now)
        elif peer is not None:
            self.handoffs.link_up(peer, now)
        self._after(now)

    def link_closed(self, peer_name: str, reason: str, now: float) -> None:
        peer = self.peers.get(peer_name)
        if peer is not None:
            self.peers.closed(peer_name)
            self.handoffs.link_down(peer, reason, now)
        self._after(now)

    def warm(self, addresses: list[WorkerAddress]) -> None:
        """Prefill workers that exist: dial them before the first request needs them."""
        self.peers.members(addresses)

    def from_prefill(self, peer_name: str, message: FromPrefill, now: float) -> None:
        peer = self.peers.get(peer_name)
        if peer is None:
            self.state.counters["word_of_a_lost_link"] += 1  # a former life, or one that does not fit
            return
        kind = message.WhichOneof("message")
        if kind == "accepted":
            self.handoffs.accepted(message.accepted.attempt, message.accepted.eta_s, peer, now)
        elif kind == "refused":
            self.handoffs.refused(message.refused, peer, now)
        elif kind == "offer":
            self.handoffs.offered(message.offer, peer, now)
        elif kind == "first":
            self.handoffs.first(message.first, peer, now)
        elif kind == "scored":
            self.handoffs.scored(message.scored, peer, now)
        elif kind == "done":
            self.handoffs.job_done(message.done.attempt, message.done.cached_tokens, peer, now)
        elif kind == "failed":
            self.handoffs.job_failed(message.failed, peer, now)
        elif kind == "recheck":
            self.handoffs.rechecked(message.recheck, peer, now)
        self._after(now)

    # -- engine ---------------------------------------------------------------------------------------------------

    def from_engine(self, report: Report, now: float) -> None:
        if isinstance(report, StepDone):
            seconds = now - self.state.batcher.plan_sent_at
            self._overdue.done(self.state.batcher.in_flight_tokens, seconds)
            if not report.scored:  # it took longer than its like, and says nothing of them
                self._overdue.rates.done(self.state.batcher.in_flight_work, seconds)
            self._awaited = set(self.handoffs.copying)
            self._decoding.step_done(report)
        elif isinstance(report, ReadDone | ReadFailed):
            self.handoffs.read_ended(report, now)
        elif isinstance(report, CopyDone):
            self._overdue.heard()
            self.handoffs.copy_ended(report, now)
        elif isinstance(report, DigestDone):
            self._overdue.heard()
            self._admission.digests(report, now)
        elif isinstance(report, PeerAdded):
            peer = self.peers.warmed(report)
            if peer is not None:
                self.handoffs.link_up(peer, now)
        elif isinstance(report, PeerFailed):
            peer = self.peers.unreadable(report)
            if peer is not None:
                self.handoffs.link_down(peer, f"cannot be read: {report.reason}", now)
        elif isinstance(report, Prepared):
            self._admission.prepared(report, now)
        elif isinstance(report, Fatal):
            self.state.effects.append(Lost(report.reason))
        self._after(now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """What time alone decides: deadlines, patience with prefill workers, an overdue plan (I9)."""
        for router in self.state.sessions.gone(now, self.state.config.timing.resume_s):
            for attempt in self._attempts_of(router):
                self._cancel(attempt)
        for attempt in [a for a in self.state.attempts.values() if now > a.deadline]:
            self._failed(attempt, "deadline exceeded", Blame.BLAME_DEADLINE, now)
        self.peers.keep_up(now)
        self.handoffs.tick(now)
        batcher = self.state.batcher
        sent_at = batcher.plan_sent_at if batcher.in_flight else None
        asked = bool(self.handoffs.copying) or self._admission.checking
        waited = self._overdue.check(now, sent_at, batcher.in_flight_tokens, asked=asked)
        if waited is not None:
            self.state.effects.append(Lost(f"the engine is overdue with plan {batcher.plan} after {waited:.1f} s"))
        self._after(now)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to finish, and nothing that somebody may come back for."""
        return not self.state.attempts and not self.state.sessions.owed

    # -- leaving --------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Take no new work, and no work that still waits for room: its router finds it another place at once."""
        self.state.draining = True
        self._admission.turn_away()
        self._after(now)

    def hand_over(self, now: float) -> None:
        """The time to drain is over: routers go on elsewhere with what still runs here."""
        for attempt in list(self.state.attempts.values()):
            self.state.counters["handed_over"] += 1
            self._decoding.give_back(attempt, draining=True)
        self._after(now)

    def slept(self, seconds: float) -> None:
        """This process itself did not run: nobody can be blamed for silence in that time."""
        self.state.batcher.plan_sent_at += seconds
        self._overdue.slept(seconds)
        self.handoffs.slept(seconds)
        self.state.sessions.slept(seconds)

    def next_flush(self, now: float) -> float | None:
        """Seconds until an outbox is due, or None."""
        due = self.state.sessions.next_due(now)
        return None if due is None else max(0.0, due - now)

    def flush(self, now: float) -> None:
        """Send the outboxes whose time has come."""
        self.state.sessions.flush(now)

    def take_effects(self) -> list[Effect]:
        return self.state.take_effects()

    # -- between the parts ----------------------------------------------------------------------------------------

    def _after(self, now: float) -> None:
        """After every event: admit who waits, send the next plan, flush what is due."""
        self._admission.admit_waiting(now)
        # Copies that were under way when the last plan came back run before the next one anyway; hearing of them first
        # lets a prompt that they complete join it, instead of the one after.
        if not self._awaited & self.handoffs.copying:
            step = self.state.batcher.next_step(now)
            if step is not None:
                self.state.to_engine(step)
        self.flush(now)

    def _admitted(self, attempt: Attempt, now: float) -> None:
        """Room is reserved and prefix hits are proved: remote or local?"""
        missing = len(attempt.prompt_ids) - attempt.prefix_blocks * self.state.block_size
        assert attempt.prompt is not None
        if attempt.reads_only and attempt.scored:
            self._decoding.end_unwritten(attempt)
        elif attempt.submit.prefill and missing > attempt.submit.local_max_tokens:
            attempt.phase = Phase.HANDING_OFF
            self.handoffs.start(attempt, attempt.prompt.keys(), now)
        else:
            why: LocalReason = "short prompt" if attempt.submit.prefill else "no prefill worker"
            self._local(attempt, attempt.prefix_blocks * self.state.block_size, why)

    def _local(self, attempt: Attempt, cached: int, why: LocalReason) -> None:
        message = PrefillOn(attempt=attempt.id, worker="local", cached_tokens=cached)
        self.state.to_router(attempt, FromDecode(prefill_on=message))
        self.state.counters["prefill_local"] += 1
        self.state.counters[f"local: {why}"] += 1
        lines.local(attempt, why)
        self._decoding.prefill_here(attempt)

    def _settled(self, attempt: Attempt, transfer: Transfer) -> None:
        """The hand-off is over: go on from the verified prefix."""
        marks, block_size = transfer.timeline, self.state.block_size
        assert attempt.prompt is not None
        verified = transfer.handoff.verified_blocks
        attempt.prompt.computed = verified * block_size
        total = len(transfer.handoff.keys)
        moved = transfer.handoff.outcomes["kv_blocks_verified"]
        if moved or verified == total:
            self.state.counters["handoffs"] += 1
            message = HandedOff(
                attempt=attempt.id,
                kv_bytes=marks.kv_bytes,
                cached_tokens=transfer.cached_tokens,
                transferred_tokens=(verified - transfer.handoff.first) * block_size,
                offer_wait_s=marks.offer_wait,
                wire_s=marks.wire,
                verify_s=marks.verify,
                publish_s=marks.publish,
                exposed_s=marks.exposed,
                offers=[Offered(until=until, at_s=at) for until, at in marks.offers],
                prefill_s=transfer.prefill_s,
                recomputed_tokens=(total - verified) * block_size,
                transport=self.state.config.transport.kind,
            )
            self.state.to_router(attempt, FromDecode(handed_off=message))
        if verified == total and (transfer.first_known or not attempt.owed):
            self._decoding.begin(attempt)
        else:
            self._local(attempt, transfer.handoff.first * block_size, transfer.left or "no first token")

    def _no_prefill(self, attempt: Attempt, reason: str, now: float) -> None:
        message = NoPrefill(attempt=attempt.id, reason=reason, retry_after_s=0.2)
        self.state.to_router(attempt, FromDecode(no_prefill=message))
        self._decoding.leave(attempt)

    def _failed(self, attempt: Attempt, reason: str, blame: "Blame.ValueType", now: float) -> None:
        self._decoding.fail(attempt, reason, blame)

    def _doubted(self, blocks: list[int]) -> None:
        """These left the index because what is in them may be wrong: attempts that build on them begin again, here or
        elsewhere. One finding is nobody's failure, however many attempts it meets."""
        for attempt in list(self.state.attempts.values()) if blocks else ():
            if any(not set(blocks).isdisjoint(sequence.blocks) for sequence in attempt.sequences()):
                self.state.counters["attempts_in_doubt"] += 1
                self._decoding.give_back(attempt, draining=True)

    def _own(self, router: int, attempt_id: str) -> Attempt | None:
        """An attempt of this very router: nobody can touch another one's."""
        attempt = self.state.attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.router == router else None

    def _attempts_of(self, router: int) -> list[Attempt]:
        return [a for a in self.state.attempts.values() if a.router == router]

    def _cancel(self, attempt: Attempt) -> None:
        """Nobody wants it, nor what it has written."""
        self.state.counters["attempts_cancelled"] += 1
        self._decoding.leave(attempt)
        self.state.sessions.settle(attempt.router, attempt.id)

    def _resume(self, router: int, wanted: ResumeAttempt) -> None:
        """Go on with an attempt where its router stands."""
        live = self._own(router, wanted.attempt)
        attempt = live or self.state.sessions.find_ended(router, wanted.attempt)
        if attempt is None or not can_replay(attempt, wanted):
            if live is not None:
                self._cancel(live)
            self.state.sessions.unknown(router, wanted.attempt)
            return
        self.state.counters["attempts_resumed"] += 1
        self.state.sessions.replay(attempt, wanted)
        if live is not None:
            for index in [i for i, offset in enumerate(wanted.next_offsets) if offset == STOPPED]:
                self._decoding.stop_sample(live, index)

    # -- looking in -----------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """What routers see twice a second."""
        status = make_status(self.state, self.peers, self._overdue, handoffs=self.handoffs.active)
        status.ready = not self._overdue.is_late
        return status

    def check_integrity(self) -> None:
        """Audit every book of this worker. Raises IntegrityError."""
        self.state.books.check_integrity()
        self.state.staging.check_integrity()
        self._decoding.check_integrity()
        self.state.sessions.check_integrity(self.state.attempts.values())
