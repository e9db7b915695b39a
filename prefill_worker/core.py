"""The prefill worker's brain: pure, synchronous, no clock, no sockets. A job's way through here is told in jobs.py.

This worker only ever offers: it never writes into another's memory, never waits for a decode worker, and what it offers
it may still lose - the generation and the digest in the offer are what the reader believes, not our promise.
"""

from collections import Counter

from cluster.core.config import ClusterConfig
from cluster.core.keys import KeyChain, root_key
from cluster.scores import messages as score_messages
from cluster.stubs.common_pb2 import Blame, WorkerIdentity
from cluster.stubs.link_pb2 import (
    FromDecodePeer,
    FromPrefill,
    JobAccepted,
    JobDone,
    JobFailed,
    JobRefused,
    Offer,
    OfferedBlock,
    PrefillHello,
    Recheck,
)
from cluster.stubs.link_pb2 import Job as JobMessage
from cluster.stubs.watch_pb2 import Status
from engine.asked import rules_of, spec_of
from engine.batcher import Batcher, RowResult
from engine.faults import make_books
from engine.messages import (
    Command,
    Digest,
    DigestDone,
    Fatal,
    Poison,
    Prepare,
    Prepared,
    Report,
    Scored,
    Serve,
    StepDone,
)
from engine.overdue import OverdueWatch
from engine.prefix import keep_right_hits
from engine.questions import Questions
from engine.scheduler import StepBudget
from engine.scoring import usable_blocks
from engine.sequence import Sequence
from prefill_worker.effects import Effect, Lost, ToDecode, ToEngine
from prefill_worker.jobs import Job, Phase, first_tokens, job_problem, scoring
from prefill_worker.readers import Readers
from prefill_worker.recheck import distrusted, vouch
from prefill_worker.status import make_status

RETRY_AFTER_S = 0.05


class PrefillCore:
    """One prefill worker."""

    def __init__(self, config: ClusterConfig, hello: PrefillHello, *, vocab_size: int, max_context: int) -> None:
        self._config = config
        self._hello = hello
        self._vocab_size = vocab_size
        self._max_context = max_context
        self.block_size = hello.identity.layout.block_size
        self.books = make_books(
            config.num_blocks("prefill"), config.faults_of(hello.identity.worker), config.routing_stride
        )
        budget = StepBudget(config.chunk_tokens("prefill"), config.engine.max_batch)
        self.batcher = Batcher(self.books, self.block_size, budget, make_room=lambda _: False)
        self.jobs: dict[tuple[str, str], Job] = {}
        self.counters: Counter[str] = Counter()
        self.draining = False
        self._overdue = OverdueWatch()
        self._checks: Questions[Job | tuple[str, Recheck]] = Questions("digests")
        self._preparing: Questions[Job] = Questions("grammar")
        self._effects: list[Effect] = []
        self._readers = Readers()

    # -- decode workers -------------------------------------------------------------------------------------------

    def link_opened(self, link: str, theirs: WorkerIdentity, now: float) -> None:
        """A decode worker has said hello; it judges whether we fit. Until it has warmed the link, the engine helps."""
        self._readers.opened(link)
        self._send(link, FromPrefill(hello=self._hello))
        self._serve(now)

    def link_closed(self, link: str, now: float) -> None:
        """Nobody can take what these jobs offer."""
        for job in [j for j in self.jobs.values() if j.link == link]:
            self._leave(job, "link_closed")
        self._readers.closed(link)
        self._after(now)

    def from_decode(self, link: str, message: FromDecodePeer, now: float) -> None:
        kind = message.WhichOneof("message")
        if kind == "job":
            self._accept(link, message.job, now)
        elif kind == "cancel":
            job = self.jobs.get((link, message.cancel.attempt))
            if job is not None:
                self._leave(job, "cancelled")
        elif kind == "taken":
            job = self.jobs.get((link, message.taken.attempt))
            if job is not None and message.taken.all:
                self._leave(job, "taken")
        elif kind == "recheck":
            self._recheck(link, message.recheck)
        elif kind == "warmed":
            self._readers.warmed(link, now, needs_polling=message.warmed.needs_polling)
        self._after(now)

    # -- engine ---------------------------------------------------------------------------------------------------

    def from_engine(self, report: Report, now: float) -> None:
        if isinstance(report, StepDone):
            seconds = now - self.batcher.plan_sent_at
            self._overdue.done(self.batcher.in_flight_tokens, seconds)
            if not report.scored:  # it took longer than its like, and says nothing of them
                self._overdue.rates.done(self.batcher.in_flight_work, seconds)
            for result in self.batcher.on_done(report):
                self._advance(result, now)
            self.counters["steps"] += 1
        elif isinstance(report, DigestDone):
            self._overdue.heard()
            checked = self._checks.answered(report.id)
            if isinstance(checked, Job):
                self._checked(checked, report.digests, now)
            else:
                self._rechecked(*checked, report.digests)
        elif isinstance(report, Prepared):
            self._prepared(self._preparing.answered(report.id), report.error, now)
        elif isinstance(report, Fatal):
            self._effects.append(Lost(report.reason))
        self._after(now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Deadlines, pins that nobody took, an overdue plan (I9)."""
        for job in list(self.jobs.values()):
            if job.phase is Phase.DONE:  # it was told so: another word about it would be a second outcome
                if now > min(job.pinned_until, job.deadline):
                    self._leave(job, "pins_expired")
            elif now > job.deadline:
                self._fail(job, "deadline exceeded", Blame.BLAME_DEADLINE)
        sent_at = self.batcher.plan_sent_at if self.batcher.in_flight else None
        waited = self._overdue.check(now, sent_at, self.batcher.in_flight_tokens, asked=bool(self._checks))
        if waited is not None:
            self._effects.append(Lost(f"the engine is overdue with plan {self.batcher.plan} after {waited:.1f} s"))
        self._after(now)

    def slept(self, seconds: float) -> None:
        """This process itself did not run: the engine cannot be blamed for silence in that time."""
        self.batcher.plan_sent_at += seconds
        self._overdue.slept(seconds)

    def hand_over(self, now: float) -> None:
        """The time to drain is over: decode workers keep what they have verified and go on without us."""
        for job in list(self.jobs.values()):
            self._fail(job, "draining", Blame.BLAME_WORKER)
        self._after(now)

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    # -- accepting ------------------------------------------------------------------------------------------------

    def _accept(self, link: str, message: JobMessage, now: float) -> None:
        chunk, vocab, context = self.batcher.budget.chunk_tokens, self._vocab_size, self._max_context
        problem = job_problem(message, vocab_size=vocab, max_context=context, chunk_tokens=chunk)
        if problem is None and (link, message.attempt) in self.jobs:
            problem = "this attempt has a job here already"
        if problem is not None:
            self.counters["jobs_invalid"] += 1
            self._send(
                link, FromPrefill(failed=JobFailed(attempt=message.attempt, reason=problem, blame=Blame.BLAME_REQUEST))
            )
            return
        job, reason = self._reserve(link, message, now)
        if job is None:
            self.counters["jobs_refused"] += 1
            never = -(-len(message.tokens) // self.block_size) > self.books.num_blocks
            told = JobRefused(attempt=message.attempt, reason=reason, retry_after_s=RETRY_AFTER_S, permanent=never)
            self._send(link, FromPrefill(refused=told))
            return
        self.jobs[job.id] = job
        self.counters["jobs_accepted"] += 1
        accepted = JobAccepted(attempt=message.attempt, eta_s=self._overdue.predict(self.queued_tokens))
        self._send(link, FromPrefill(accepted=accepted))
        if job.prefix_blocks and self._config.engine.verify == "full":
            job.awaited += 1
            self._digest(job.sequence.blocks[: job.prefix_blocks], job)
        if job.sequence.grammar is not None:
            job.awaited += 1
            self._to_engine(Prepare(self._preparing.ask(job), job.sequence.grammar))
        if not job.awaited:
            self._run(job, now)

    def _reserve(self, link: str, message: JobMessage, now: float) -> tuple[Job | None, str]:
        """Own every block of the prompt, or say why not."""
        if self.draining or self._overdue.is_late:
            return None, "draining" if self.draining else "the engine is late"
        size = self.block_size
        tokens = list(message.tokens)
        wanted = scoring(message)
        whole = bool(message.sample_indices) or wanted is not None  # its last position gives something
        if not whole:
            tokens = tokens[: len(tokens) // size * size]
        chain = KeyChain(root_key(self._hello.identity.fingerprint, salt=message.salt), size)
        usable = chain.extend(tokens)[: usable_blocks(len(tokens), size, wanted) if whole else None]
        hits = self.books.match(usable)
        queued, need = self.queued_tokens, len(tokens) - len(hits) * size
        if queued and queued + need > self._config.handoff.admission_window_tokens:
            return None, f"{queued} tokens are queued"
        draws = [spec_of(message.sampling, index) for index in message.sample_indices]
        rules = (
            rules_of(message.sampling, message.prompt_tokens or len(tokens), message.stop_token_ids) if draws else None
        )
        sequence = Sequence(self.batcher.new_id(), tokens, chain, draws, arrival=now, rules=rules, scoring=wanted)
        self.books.share(hits, sequence.owner)
        sequence.blocks = list(hits)
        if not sequence.reserve(self.books, len(tokens), size):
            reason = f"{self.books.available} blocks are free"
            sequence.release(self.books)
            return None, reason
        self.batcher.add(sequence)
        digests = [self.books.digest_of(block) for block in hits]  # some may leave the index before the job runs
        return Job(link, message, sequence, len(hits), digests, now, now + message.deadline_s), ""

    def _checked(self, job: Job, digests: list[bytes], now: float) -> None:
        if self.jobs.get(job.id) is not job:
            return
        right, room, doubted = keep_right_hits(self.books, job.sequence, job.prefix_blocks, digests)
        self._doubt(doubted)
        if not room:
            self._fail(job, "no room to replace a prefix block that failed its check", Blame.BLAME_WORKER)
            return
        if right < job.prefix_blocks:
            self.counters["prefix_hit_corrupt"] += 1
            job.prefix_blocks = right
        self._checked_off(job, now)

    def _prepared(self, job: Job, error: str, now: float) -> None:
        """The engine can keep the job's draws to its grammar, or cannot."""
        if self.jobs.get(job.id) is job:
            self._fail(job, error, Blame.BLAME_REQUEST) if error else self._checked_off(job, now)

    def _checked_off(self, job: Job, now: float) -> None:
        """One thing less that the job waits for."""
        job.awaited -= 1
        if not job.awaited:
            self._run(job, now)

    # -- running --------------------------------------------------------------------------------------------------

    def _run(self, job: Job, now: float) -> None:
        job.phase = Phase.RUNNING
        job.sequence.computed = job.prefix_blocks * self.block_size
        self.counters["prefix_hit_tokens"] += job.sequence.computed
        job.next_offer = job.message.first_position // self.block_size
        job.digests = dict(enumerate(job.hit_digests[: job.prefix_blocks]))
        self._offer(job)
        if job.sequence.computed < len(job.sequence.tokens):
            job.sequence.runnable = True
        else:
            self._finish(job, now)

    def _advance(self, result: RowResult, now: float) -> None:
        """A chunk came back: offer what it filled, send what it drew."""
        if (job := next((j for j in self.jobs.values() if j.sequence is result.sequence), None)) is None:
            return
        if result.error is not None:
            self._fail(job, result.error.reason, Blame.BLAME_REQUEST if result.error.refused else Blame.BLAME_UNSETTLED)
            return
        self.counters["prompt_tokens_computed"] += result.written
        for index, block in result.filled:
            job.digests[index] = block.digest
        self._tell(job, result.scored)
        self._offer(job)
        if job.sequence.computed >= len(job.sequence.tokens):
            if result.sampled:
                self._send(job.link, FromPrefill(first=first_tokens(job, result.sampled, self.block_size)))
            self._finish(job, now)

    def _tell(self, job: Job, scored: Scored | None) -> None:
        """Log-probabilities of the prompt's tokens: before the blocks that decode could go on from without them."""
        wanted = job.sequence.scoring
        if scored is None or wanted is None:
            return
        arrays = (scored.logprobs, scored.ids, scored.ranks)
        for message in score_messages(job.message.attempt, wanted.next, scored.top, *arrays):
            self._send(job.link, FromPrefill(scored=message))
        wanted.next += scored.rows

    def _offer(self, job: Job) -> None:
        """Offer every block that is full and was not offered, in prompt order."""
        blocks, start, keys = list[OfferedBlock](), job.next_offer, job.sequence.keys()
        while (digest := job.digests.pop(job.next_offer, None)) is not None:
            block = job.sequence.blocks[job.next_offer]
            generation = self.books.generation(block)
            blocks.append(OfferedBlock(block=block, generation=generation, key=keys[job.next_offer], digest=digest))
            job.next_offer += 1
        if blocks:
            job.offered |= {block.block: block for block in blocks}
            last = job.next_offer == len(job.sequence.tokens) // self.block_size
            self.counters["blocks_offered"] += len(blocks)
            offer = Offer(attempt=job.message.attempt, first_position=start * self.block_size, blocks=blocks, last=last)
            self._send(job.link, FromPrefill(offer=offer))

    def _finish(self, job: Job, now: float) -> None:
        """The prompt is read. What was offered stays pinned a while; without offers nothing is left to wait for."""
        job.phase = Phase.DONE
        job.sequence.runnable = False
        job.pinned_until = now + self._config.handoff.pin_s
        cached = job.prefix_blocks * self.block_size
        done = JobDone(attempt=job.message.attempt, seconds=now - job.arrival, cached_tokens=cached)
        self._send(job.link, FromPrefill(done=done))
        if job.next_offer <= job.message.first_position // self.block_size:
            self._leave(job, "nothing_offered")

    # -- ending ---------------------------------------------------------------------------------------------------

    def _fail(self, job: Job, reason: str, blame: "Blame.ValueType") -> None:
        failed = JobFailed(attempt=job.message.attempt, reason=reason, blame=blame)
        self._send(job.link, FromPrefill(failed=failed))
        self._leave(job, "failed")

    def _leave(self, job: Job, how: str) -> None:
        """The job owns nothing from now on. Valid in every phase, twice as well."""
        if self.jobs.pop(job.id, None) is not None:
            self.counters[f"jobs_{how}"] += 1
            self.batcher.remove(job.sequence)

    # -- rechecking -----------------------------------------------------------------------------------------------

    def _recheck(self, link: str, recheck: Recheck) -> None:
        """A reader doubts blocks we offered: look at the bytes again before vouching for them."""
        if len(recheck.blocks) > self.books.num_blocks:  # nobody was offered so many, and looking costs time
            self.counters["rechecks_invalid"] += 1
            return
        self._digest([ref.block for ref in recheck.blocks if 0 <= ref.block < self.books.num_blocks], (link, recheck))

    def _rechecked(self, link: str, recheck: Recheck, digests: list[bytes]) -> None:
        offered = job.offered if (job := self.jobs.get((link, recheck.attempt))) is not None else {}
        answer, doubted = vouch(self.books, self.counters, recheck, digests, offered)
        self._send(link, FromPrefill(recheck=answer))
        self._doubt(doubted)

    def _doubt(self, blocks: list[int]) -> None:
        """Something in these is wrong: jobs that build on any are over, done or not."""
        for job, failed in distrusted(self.jobs.values(), blocks):
            self._send(job.link, FromPrefill(failed=failed))
            self._leave(job, "failed")

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def queued_tokens(self) -> int:
        """Prompt positions accepted and not yet computed."""
        return sum(job.remaining for job in self.jobs.values())

    def _digest(self, blocks: list[int], owner: "Job | tuple[str, Recheck]") -> None:
        self._to_engine(Digest(self._checks.ask(owner), list(blocks)))

    def _send(self, link: str, message: FromPrefill) -> None:
        self._effects.append(ToDecode(link, message))

    def _to_engine(self, command: Command) -> None:
        recycled = self.books.take_recycled()
        if recycled and self._config.engine.poison:
            self._effects.append(ToEngine(Poison(recycled)))
        self._effects.append(ToEngine(command))

    def _serve(self, now: float) -> None:
        """Have the engine poll for its readers exactly while one may need it."""
        change = self._readers.change((job.link for job in self.jobs.values()), now)
        if change is not None:
            self._to_engine(Serve(change))

    def _after(self, now: float) -> None:
        self._serve(now)
        step = self.batcher.next_step(now)
        if step is not None:
            self._to_engine(step)

    # -- looking in -----------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """What routers see twice a second."""
        status = make_status(self._config, self.jobs.values(), self.batcher, self._overdue, self.counters)
        status.draining = self.draining
        return status

    def check_integrity(self) -> None:
        """Audit every book of this worker. Raises IntegrityError."""
        self.books.check_integrity()
        assert set(self.batcher.sequences) == {job.sequence.id for job in self.jobs.values()}
