"""Hand-offs of this decode worker: jobs to prefill workers, reads, copies, verification, publishing (DESIGN §4.6-4.9).

    1. `start`       send the Job to the best prefill worker; at most two are tried
    2. Offer         blocks that can be read become reads, each into its own staging slot
    3. ReadDone      copy the slot into private blocks and digest the copy
    4. CopyDone      compare; right blocks are verified and, in order, published; wrong ones are rechecked
    5. First         the first token goes out at once
    6. settled       every block verified and every first token known -> decode; or the rest is computed here
Nothing waits here: `tick` moves on what makes no progress.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.handoff_ends import Cause, Left
from cluster.core.keys import BlockKey
from cluster.stubs.common_pb2 import Blame, PromptLogprobs, WorkerAddress
from cluster.stubs.link_pb2 import (
    BlockRef,
    CancelJob,
    First,
    FromDecodePeer,
    JobFailed,
    JobRefused,
    Offer,
    Recheck,
    RecheckResult,
    Taken,
)
from cluster.stubs.session_pb2 import FromDecode, PrefillOn
from decode_worker import lines
from decode_worker.attempts import Attempt
from decode_worker.jobs import answers, follows, is_told, make_job
from decode_worker.peers import LinkState, Peer, Peers
from decode_worker.publishing import close, distrust, publish
from decode_worker.state import State, copy_owner
from decode_worker.transfer import POKE_S, Transfer
from engine.messages import Copy, CopyDone, Read, ReadDone, ReadFailed
from kv_transfer.handoff import HandOff, Word
from kv_transfer.ranges import merge_ranges

MAX_PREFILL_TRIES = 2
_HOLDERS_FAULTS: tuple[Cause, ...] = (
    "read timed out", "read failed", "no offer in time", "job failed", "sent corrupt blocks",
)  # but no refusal, no lost link  # fmt: skip
_HOLDERS_LIES: tuple[Cause, ...] = ("offered other content", "sent other first tokens", "told other log-probabilities")


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the core does when a hand-off gets somewhere."""

    first: Callable[[Attempt, First], None]
    settled: Callable[[Attempt, Transfer], None]
    no_prefill: Callable[[Attempt, str, float], None]
    failed: Callable[[Attempt, str, "Blame.ValueType", float], None]
    scored: Callable[[Attempt, PromptLogprobs], None]
    doubted: Callable[[list[int]], None]


class HandOffs:
    """Every hand-off in progress."""

    def __init__(self, state: State, peers: Peers, callbacks: Callbacks) -> None:
        self._state = state
        self._peers = peers
        self._on = callbacks
        self._transfers: dict[str, Transfer] = {}
        self._reads: dict[int, Transfer] = {}  # reads and copies in progress that somebody waits for
        self._copying: dict[int, list[int]] = {}  # blocks under each copy in progress

    @property
    def active(self) -> int:
        return len(self._transfers)

    @property
    def copying(self) -> set[int]:
        """Ids of the copies under way."""
        return set(self._copying)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, keys: list[BlockKey], now: float) -> None:
        """Begin: blocks [attempt.prefix_blocks, len(keys)) are to come from a prefill worker."""
        handoff = HandOff(keys, attempt.prefix_blocks, self._state.block_size, self._state.counters)
        self._state.counters["kv_blocks_wanted"] += len(keys) - attempt.prefix_blocks
        transfer = Transfer(attempt, handoff, list(attempt.submit.prefill), published=attempt.prefix_blocks)
        self._transfers[attempt.id] = transfer
        self._try_next(transfer, now)

    def cancel(self, attempt: Attempt) -> None:
        """Forget a hand-off, in any state, twice as well. Reads end in staging; started copies keep their blocks."""
        transfer = self._transfers.pop(attempt.id, None)
        if transfer is None:
            return
        transfer.timeline.left("abandoned" if attempt.live else "answered")
        close(self._state, transfer, "abandoned")
        self._leave_holder(transfer, cancel=True)
        self._give_up_reads(transfer)

    def tick(self, now: float) -> None:
        """Move on what makes no progress."""
        limits = self._state.config.handoff
        for agent in self._state.staging.unended:
            self._peers.help_to_end(agent, now)
        for transfer in list(self._transfers.values()):
            waiting = [now - at for at in transfer.timeline.posted.values()]
            if waiting and max(waiting) > POKE_S and transfer.peer is not None:
                self._peers.ask_to_poll(transfer.peer)
            late = [r for r, at in transfer.timeline.posted.items() if now - at > limits.read_timeout_s]
            for read_id in late:
                self._give_up(transfer, read_id)
            if late:
                self._next_holder(transfer, "read timed out", now)
            elif transfer.starved(self._state.staging, now, limits.offer_timeout_s):
                self._next_holder(transfer, "no offer in time", now)
        self._post_reads(now)  # reads that were given up leave room for others

    def slept(self, seconds: float) -> None:
        """Nobody heard anybody for so long: holders and reads get that time back."""
        for transfer in self._transfers.values():
            transfer.progress_at += seconds
            for read_id in transfer.timeline.posted:
                transfer.timeline.posted[read_id] += seconds

    # -- link events ----------------------------------------------------------------------------------------------

    def link_up(self, peer: Peer, now: float) -> None:
        """The link is open or the engine can read from the peer now."""
        for transfer in self._of(peer):
            transfer.progress_at = now
        self._post_reads(now)

    def link_down(self, peer: Peer, reason: str, now: float) -> None:
        """The link is gone, or cannot be used."""
        for transfer in self._of(peer):
            self._next_holder(transfer, "link lost", now, detail=reason)

    def accepted(self, attempt_id: str, eta_s: float, peer: Peer, now: float) -> None:
        transfer = self._current(attempt_id, peer)
        if transfer is not None:
            transfer.accepted, transfer.eta, transfer.progress_at = True, eta_s, now

    def refused(self, message: JobRefused, peer: Peer, now: float) -> None:
        transfer = self._current(message.attempt, peer)
        if transfer is not None:
            self._next_holder(transfer, "refused", now, detail=message.reason)

    def job_failed(self, message: JobFailed, peer: Peer, now: float) -> None:
        transfer = self._current(message.attempt, peer)
        if transfer is not None and message.blame in (Blame.BLAME_REQUEST, Blame.BLAME_DEADLINE):
            transfer.timeline.left("invalid" if message.blame == Blame.BLAME_REQUEST else "deadline")
            self._on.failed(transfer.attempt, message.reason, message.blame, now)
        elif transfer is not None and message.HasField("distrusted_from"):
            self._on.doubted(distrust(self._state, transfer, message.distrusted_from))
            self._next_holder(transfer, "sent corrupt blocks", now, detail=message.reason)
        elif transfer is not None:
            unsettled = message.blame == Blame.BLAME_UNSETTLED
            transfer.attempt.suspects += [peer.name] if unsettled else []
            self._next_holder(transfer, "job could not run" if unsettled else "job failed", now, detail=message.reason)

    def offered(self, offer: Offer, peer: Peer, now: float) -> None:
        transfer = self._current(offer.attempt, peer)
        if transfer is None:
            self._state.counters["offer_late"] += 1  # its hand-off is over, or has another holder
            return
        transfer.progress_at = now
        transfer.timeline.offer(offer.first_position + len(offer.blocks) * self._state.block_size, now)
        if not is_told(offer, transfer.attempt, self._state.block_size):
            self._next_holder(transfer, "told other log-probabilities", now)
            return
        keys = transfer.keys_at(peer, self._state.block_size)
        if not transfer.handoff.offer(offer.first_position, offer.blocks, keys):
            self._next_holder(transfer, "offered other content", now)
            return
        self._post_reads(now)

    def first(self, message: First, peer: Peer, now: float) -> None:
        transfer = self._current(message.attempt, peer)
        if transfer is None or transfer.first_known:
            return
        if not answers(message, transfer, self._state.facts.vocab_size):
            self._next_holder(transfer, "sent other first tokens", now)
            return
        transfer.first_known = True
        transfer.progress_at = now
        transfer.cached_tokens = message.cached_tokens
        transfer.prefill_s = now - transfer.timeline.job_sent
        if message.cached_tokens:  # nothing else may follow, should the first token be the last
            self._tell_holder(transfer, peer)
        self._on.first(transfer.attempt, message)
        self._settle(transfer, now)

    def scored(self, message: PromptLogprobs, peer: Peer, now: float) -> None:
        """Log-probabilities of the prompt's tokens, ahead of the blocks that were computed with them."""
        transfer = self._current(message.attempt, peer)
        if transfer is None:
            return
        if not follows(message, transfer.attempt, self._state.facts.vocab_size):
            self._next_holder(transfer, "told other log-probabilities", now)
            return
        transfer.progress_at = now
        self._on.scored(transfer.attempt, message)

    def job_done(self, attempt_id: str, cached_tokens: int, peer: Peer, now: float) -> None:
        transfer = self._current(attempt_id, peer)
        if transfer is not None and not transfer.attempt.scored:
            self._next_holder(transfer, "told other log-probabilities", now)
        elif transfer is not None:
            transfer.prefill_done, transfer.cached_tokens, transfer.progress_at = True, cached_tokens, now
            self._settle(transfer, now)

    def rechecked(self, result: RecheckResult, peer: Peer, now: float) -> None:
        transfer = self._current(result.attempt, peer)
        if transfer is None:
            return
        handoff = transfer.handoff
        words = [handoff.rechecked(b.block, b.generation, current=b.current, corrupt=b.corrupt) for b in result.blocks]
        corrupt = [index for word, index in words if word is Word.CORRUPT]
        if corrupt:
            self._on.doubted(distrust(self._state, transfer, min(corrupt)))
            self._next_holder(transfer, "sent corrupt blocks", now)
        elif any(word is Word.STALE for word, _ in words):
            self._next_holder(transfer, "holder lost the blocks", now)
        else:
            self._post_reads(now)

    # -- engine events --------------------------------------------------------------------------------------------

    def read_ended(self, report: ReadDone | ReadFailed, now: float) -> None:
        """A read is over: copy what it brought, or want its blocks again."""
        transfer = self._reads.get(report.id)
        done = isinstance(report, ReadDone)
        slot = self._state.staging.read_ended(report.id, bytes_wanted=done and transfer is not None)
        if transfer is None:
            self._state.counters["read_late"] += 1  # it was given up before; its bytes stay in the slot
            self._post_reads(now)
            return
        transfer.timeline.read(report.id, now)
        if isinstance(report, ReadFailed) or slot is None:
            del self._reads[report.id]
            transfer.timeline.drop(report.id)
            transfer.handoff.read_failed(report.id)
            self._next_holder(transfer, "read failed", now)
            self._post_reads(now)
            return
        indexes = transfer.handoff.read_done(report.id)
        assert transfer.attempt.prompt is not None
        blocks = [transfer.attempt.prompt.blocks[i] for i in indexes]
        self._state.books.share(blocks, copy_owner(report.id))
        self._copying[report.id] = blocks
        self._state.to_engine(Copy(report.id, slot, blocks, transfer.holders[report.id].source))

    def copy_ended(self, report: CopyDone, now: float) -> None:
        """A copy is in private memory: judge it."""
        self._state.staging.copy_ended(report.id)
        self._state.books.release(self._copying.pop(report.id), copy_owner(report.id))
        transfer = self._reads.pop(report.id, None)
        if transfer is None or transfer.closed:
            self._state.counters["copy_late"] += 1
            self._post_reads(now)
            return
        transfer.progress_at = now
        outcomes = transfer.handoff.outcomes
        before = outcomes["kv_blocks_verified"]
        verified, doubted = transfer.handoff.copy_done(report.id, report.digests, report.converted)
        moved = (outcomes["kv_blocks_verified"] - before) * transfer.holders[report.id].block_bytes
        self._state.counters["kv_bytes"] += moved
        transfer.timeline.copied(report.id, moved, now)
        publish(self._state, transfer, {v.index: v.digest for v in verified}, now)
        if doubted and transfer.peer is not None:
            refs = [BlockRef(block=b.block, generation=b.generation) for b in doubted]
            self._peers.send(transfer.peer, FromDecodePeer(recheck=Recheck(attempt=transfer.attempt.id, blocks=refs)))
        self._post_reads(now)
        self._settle(transfer, now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _of(self, peer: Peer) -> list[Transfer]:
        return [t for t in self._transfers.values() if t.peer is peer]

    def _current(self, attempt_id: str, peer: Peer) -> Transfer | None:
        transfer = self._transfers.get(attempt_id)
        return transfer if transfer is not None and transfer.peer is peer else None

    def _next_holder(self, transfer: Transfer, cause: Left, now: float, *, detail: str = "") -> None:
        """Leave the present prefill worker and try the next one.

        `cause` is counted; `detail` may be a peer's own words, and is only passed on to the router.
        """
        if transfer.closed:
            return
        refused = cause in ("refused", "unusable")
        if transfer.peer is not None:
            self._state.counters["job_refused" if refused else f"handoff_left: {cause}"] += 1
            lines.left(transfer.attempt, transfer.peer.address.worker, cause)
            transfer.leaves(transfer.peer.address.worker, cause, detail)
            if cause in (*_HOLDERS_FAULTS, *_HOLDERS_LIES) and self._peers.breaker(transfer.peer).failed(now):
                self._state.counters["breaker_opened"] += 1
            self._leave_holder(transfer, cancel=not refused)
            self._give_up_reads(transfer)
        self._try_next(transfer, now, refused=refused)

    def _try_next(self, transfer: Transfer, now: float, *, refused: bool = False) -> None:
        """Ask the next prefill worker; with none left compute the rest here, or give it back when all refused."""
        if transfer.handoff.complete and not transfer.attempt.owed:
            self._settle(transfer, now)
            return
        wanted = not transfer.handoff.complete or (transfer.tried == 0 and transfer.attempt.owed)
        if transfer.candidates and transfer.tried < MAX_PREFILL_TRIES and wanted:
            self._send_job(transfer, transfer.candidates.pop(0), now)
            return
        if refused and not transfer.accepted and transfer.handoff.verified_blocks == transfer.handoff.first:
            del self._transfers[transfer.attempt.id]
            close(self._state, transfer, "refused")
            self._on.no_prefill(transfer.attempt, "; ".join(transfer.refusals), now)
            return
        self._settle(transfer, now)

    def _send_job(self, transfer: Transfer, address: WorkerAddress, now: float) -> None:
        transfer.tried += 1
        transfer.peer = peer = self._peers.reach(address)
        transfer.progress_at = now
        transfer.eta, transfer.left = 0.0, None
        unusable = peer.reason if peer.link is LinkState.MISMATCH else ""
        if self._state.staging.stuck(peer.name):
            unusable = "reads that do not end hold all the slots it may have"
        elif not unusable and not self._peers.breaker(peer).allows(now):
            unusable = "its last hand-offs failed, one after the other"
        if unusable:
            self._next_holder(transfer, "unusable", now, detail=unusable)
            return
        transfer.timeline.asked(self._state.pairs.of(address.worker), now)
        self._tell_holder(transfer, peer)
        job = make_job(transfer, now, self._state.block_size)
        self._peers.send(peer, FromDecodePeer(job=job))

    def _tell_holder(self, transfer: Transfer, peer: Peer) -> None:
        worker, cached = peer.address.worker, transfer.cached_tokens
        message = PrefillOn(attempt=transfer.attempt.id, worker=worker, cached_tokens=cached)
        self._state.to_router(transfer.attempt, FromDecode(prefill_on=message))

    def _leave_holder(self, transfer: Transfer, *, cancel: bool) -> None:
        peer, transfer.peer = transfer.peer, None
        if peer is None or self._peers.get(peer.name) is not peer:
            return
        peer.waiting = [m for m in peer.waiting if m.job.attempt != transfer.attempt.id]
        if cancel and peer.link is LinkState.UP:
            self._peers.send(peer, FromDecodePeer(cancel=CancelJob(attempt=transfer.attempt.id)))

    def _give_up_reads(self, transfer: Transfer) -> None:
        for read_id in transfer.handoff.forget_holder():
            self._give_up(transfer, read_id)
        if transfer.closed:
            for read_id in [r for r, t in self._reads.items() if t is transfer]:
                del self._reads[read_id]  # copies: their blocks stay owned by the copy

    def _give_up(self, transfer: Transfer, read_id: int) -> None:
        transfer.timeline.drop(read_id)
        if self._reads.pop(read_id, None) is not None:
            transfer.handoff.give_up(read_id)
            self._state.staging.give_up(read_id)

    def _post_reads(self, now: float) -> None:
        """Post every read there is a slot for, oldest hand-off first."""
        for transfer in list(self._transfers.values()):
            peer = transfer.peer
            if peer is None or peer.hello is None or not peer.readable:
                continue
            block_bytes = peer.block_bytes
            while run := transfer.handoff.next_range(max(1, self._state.config.handoff.slot_bytes // block_bytes)):
                started = self._state.staging.start_read(peer.hello.agent)
                if started is None:
                    break
                read_id, slot = started
                transfer.handoff.start_read(read_id, [index for index, _ in run])
                self._reads[read_id], transfer.holders[read_id] = transfer, peer
                transfer.timeline.post(read_id, now)
                ranges = merge_ranges([peer.hello.pool_address + o.block * block_bytes for _, o in run], block_bytes)
                self._state.to_engine(Read(read_id, peer.hello.agent, ranges, slot))

    def _settle(self, transfer: Transfer, now: float) -> None:
        """Finish the hand-off when nothing is outstanding: all here, or no holder left and no copy in progress."""
        if transfer.closed:
            return
        all_told = transfer.first_known or not transfer.attempt.owed
        finished = transfer.handoff.complete and (all_told or transfer.prefill_done or transfer.peer is None)
        stranded = transfer.peer is None and not transfer.handoff.reads
        if not finished and not stranded:
            return
        del self._transfers[transfer.attempt.id]
        if transfer.peer is not None:
            transfer.timeline.settled(now)
            if transfer.has_read:
                self._peers.breaker(transfer.peer).succeeded()
            taken = Taken(attempt=transfer.attempt.id, until_position=len(transfer.attempt.prompt_ids), all=True)
            self._peers.send(transfer.peer, FromDecodePeer(taken=taken))
        close(self._state, transfer, "recomputed")
        self._on.settled(transfer.attempt, transfer)
