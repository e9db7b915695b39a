"""One request over all its attempts: what has been emitted, what runs, what it may still try (DESIGN §4.5, §6). Pure.

    waiting --started--> running --every sample ended--> ended
       ^                    |
       +----- put back -----+   refused, no prefill, pre-empted, failed, worker lost

A token that was delivered is history: the next attempt carries it and no retry changes it. Runs are idempotent by
offset: what was delivered before is compared and dropped; a gap or a contradiction means that the attempt cannot be
trusted.
"""

import enum
from dataclasses import dataclass, field

from cluster.core.errors import DeadlineExceeded
from cluster.core.ids import attempt_id
from cluster.core.keys import BlockKey, KeyChain, root_key
from cluster.scores import Scores, read
from cluster.stubs.common_pb2 import Grammar, PromptLogprobs, Sampling, ScorePrompt, WorkerAddress
from cluster.stubs.common_pb2 import TokenLogprob as ToldLogprob
from cluster.stubs.session_pb2 import HandedOff, PrefillOn, ResumeAttempt, SampleState, Submit, TokenRun
from router.lanes import Entry
from router.placement import Demand, Placement, Shape
from router.records import AttemptRecord, RequestRecord
from router.requests import EndReason, Request, TokenEvent, TokenLogprob

PREEMPTIONS_BEFORE_WORST_CASE = 2
NO_PREFILL_BEFORE_LOCAL = 3
LOCAL = "local"  # what PrefillOn says when decode computes the prompt

_ENDS: dict[str, EndReason | None] = {"": None, "eos": "eos", "stop": "stop", "length": "length"}


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Sample:
    """One stream of the request: the ids delivered so far, and whether it has ended."""

    emitted: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True)
class Attempt:
    """One try on one decode worker."""

    id: str
    address: str
    epoch: int
    submitted: float
    prefill: dict[str, str]  # name -> address, ranked
    forced_local: bool
    blocks: int  # asked of the decode worker
    tokens: int  # prompt and history
    record: AttemptRecord
    accepted: bool = False
    handed_off: bool = False
    computed: bool = False  # its prompt: nothing of that is booked any more
    booked_prefill: str | None = None  # address


@dataclass(slots=True)
class Tries:
    """What a request has been through. `failures` alone counts against max_attempts.

    `got_at_loss`: what it had been given (Follow.got) when an attempt of it last failed.
    """

    number: int = 0
    failures: int = 0
    lost: int = 0  # with a connection, nobody's fault
    silenced: int = 0  # with a worker that fell silent, after it had got on
    got_at_loss: int = 0
    preemptions: int = 0
    handed_over: int = 0  # by workers that left in order
    no_prefill: int = 0
    avoid: set[int] = field(default_factory=set)
    could_not_run: list[int] = field(default_factory=list)  # epochs; theirs was the fault if another one can
    stuck_at: list[int] = field(default_factory=list)  # tokens of each sample when the last of these gave up
    fingerprint: bytes | None = None  # of the weights that wrote the first delivered token
    waiting_since: float = 0.0  # it came to the line, or back to it
    hopeless_since: float | None = None  # nobody who is ready could ever take it


class ProtocolBreach(Exception):
    """A worker sent tokens that contradict what was delivered, or left some out."""


class Follow:
    """The state of one admitted request. `entry` is its place in the queue, the same one whenever it returns."""

    def __init__(self, request: Request, record: RequestRecord, entry: Entry, now: float) -> None:
        self.request = request
        self.record = record
        self.trace = record.trace
        self.entry = entry
        self.arrived = now
        self.phase = Phase.WAITING
        self.samples = [Sample() for _ in range(request.n)]
        self.written = 0  # tokens delivered so far, of all samples
        self.next_scored = 1  # the prompt's next token whose log-probability is wanted, if any are
        self.attempt: Attempt | None = None
        self.tries = Tries(waiting_since=now)
        self._chains: dict[tuple[bytes, int], KeyChain] = {}

    @property
    def deadline(self) -> float:
        return self.arrived + self.request.deadline_s

    def is_past(self, tokens: list[int]) -> bool:
        """Whether every sample has more than so many tokens, or has ended."""
        return all(each.finished or len(each.emitted) > at for each, at in zip(self.samples, tokens, strict=True))

    @property
    def scored(self) -> bool:
        """No log-probabilities of the prompt's tokens are wanted, or not any more."""
        return self.request.prompt_logprobs is None or self.next_scored >= len(self.request.prompt)

    @property
    def begun(self) -> bool:
        """Whether anything was delivered that other weights would contradict."""
        return any(sample.emitted for sample in self.samples) or self.next_scored > 1

    @property
    def got(self) -> int:
        """How far it is: tokens delivered, of samples and of the prompt's log-probabilities. It never shrinks."""
        return self.written + self.next_scored - 1

    @property
    def complete(self) -> bool:
        return all([sample.finished for sample in self.samples])

    def keys_of(self, shape: Shape) -> list[BlockKey]:
        """Keys of the blocks a prefix hit may cover on workers of this shape: at most (length - 1) // block_size.

        A token that is still to be scored is so by the logits of the position before it, which a cache does not have.
        """
        history = self.samples[0].emitted if self.request.n == 1 else []
        block_size = shape.layout[3]
        usable = len(self.request.prompt) + len(history) if self.scored else self.next_scored
        wanted = max(0, usable - 1) // block_size
        if not wanted:
            return []
        slot = (shape.fingerprint, block_size)
        chain = self._chains.get(slot)
        if chain is None:
            chain = self._chains[slot] = KeyChain(root_key(shape.fingerprint, salt=self.request.salt), block_size)
        if len(chain.keys) < wanted:
            chain.extend((*self.request.prompt, *history))
        return chain.keys[:wanted]

    def demand(self, local_max_tokens: int, *, may_force_local: bool) -> Demand:
        """What placement has to find room for now."""
        return Demand(
            prompt_tokens=len(self.request.prompt),
            histories=tuple(len(s.emitted) for s in self.samples if not s.finished),
            max_tokens=self.request.max_tokens,
            local_max_tokens=local_max_tokens,
            worst_case=self.tries.preemptions >= PREEMPTIONS_BEFORE_WORST_CASE,
            force_local=may_force_local and self.wants_local,
            fingerprint=self.tries.fingerprint if self.begun else None,
            avoid=frozenset(self.tries.avoid),
        )

    @property
    def wants_local(self) -> bool:
        """No prefill worker would take it so often that decode should do the prompt."""
        return self.tries.no_prefill >= NO_PREFILL_BEFORE_LOCAL

    def start(self, placement: Placement, demand: Demand, now: float) -> Attempt:
        """waiting -> running: a new attempt on the chosen worker."""
        self._must_be(Phase.WAITING)
        decode = placement.decode
        self.tries.number += 1
        self.attempt = Attempt(
            id=attempt_id(self.request.request_id, self.tries.number),
            address=decode.address,
            epoch=decode.epoch,
            submitted=now,
            prefill={p.name: p.address for p in placement.prefill},
            forced_local=demand.force_local,
            blocks=demand.need_blocks(decode.block_size),
            tokens=demand.tokens,
            record=self.record.placed(placement, now),
        )
        if not self.begun:
            self.tries.fingerprint = decode.shape.fingerprint
        self.phase = Phase.RUNNING
        self.trace.timings_ms.setdefault("queue", (now - self.arrived) * 1000)
        return self.attempt

    def submit(self, placement: Placement, now: float) -> Submit:
        """The message that starts the present attempt."""
        attempt, request = self._running(), self.request
        score = None if self.scored else ScorePrompt(top=request.prompt_logprobs or 0, start=self.next_scored)
        return Submit(
            attempt=attempt.id,
            prompt=request.prompt,
            samples=[SampleState(emitted=s.emitted, finished=s.finished) for s in self.samples],
            max_tokens=request.max_tokens,
            sampling=_sampling(request),
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            salt=request.salt,
            prefill=[WorkerAddress(worker=p.name, epoch=p.epoch, address=p.address) for p in placement.prefill],
            local_max_tokens=placement.local_max_tokens,
            deadline_s=self.deadline - now,
            waited_s=now - self.arrived,
            preemptions=self.tries.preemptions,
            score=score,
        )

    def resume(self) -> ResumeAttempt:
        """How far the present attempt has been read: what its decode worker has to send again after that."""
        offsets = [-1 if sample.finished else len(sample.emitted) for sample in self.samples]
        return ResumeAttempt(attempt=self._running().id, next_offsets=offsets, next_scored=self.next_scored)

    def accepted(self, now: float) -> None:
        """The decode worker took the attempt: the first sign of it counts."""
        attempt = self._running()
        if attempt.accepted:
            return
        attempt.accepted = True
        attempt.record.accepted_ms = self.record.since(now)
        self.trace.attempts += 1
        self.trace.timings_ms.setdefault("placed", (now - attempt.submitted) * 1000)

    def too_late(self) -> DeadlineExceeded:
        """How it ends when its deadline has passed, whoever notices first."""
        return DeadlineExceeded(f"not finished within {self.request.deadline_s:g} s")

    def turned_away(self) -> None:
        """No prefill worker would have it after all: the present attempt never began."""
        self.tries.no_prefill += 1
        if self._running().accepted:
            self.trace.attempts -= 1
            self.trace.prefill_worker = ""

    def on_prefill(self, message: PrefillOn) -> None:
        """Who computes the prompt. cached_tokens are those of the first attempt alone."""
        self.trace.prefill_worker = message.worker
        self._running().record.kv_from = "" if message.worker == LOCAL else message.worker
        if self.trace.attempts == 1:
            self.trace.cached_tokens = message.cached_tokens

    def on_handed_off(self, message: HandedOff) -> None:
        """Figures of a hand-off: bytes add up over attempts, times are those of the first."""
        attempt = self._running()
        if attempt.handed_off:  # heard before the session broke
            return
        attempt.handed_off = True
        attempt.record.kv_bytes, attempt.record.exposed_ms = message.kv_bytes, message.exposed_s * 1000
        self.trace.kv_bytes += message.kv_bytes
        self.trace.transport = message.transport
        self.trace.offers = self.trace.offers or tuple((o.until, o.at_s * 1000) for o in message.offers)
        if self.trace.attempts == 1:
            self.trace.cached_tokens = message.cached_tokens
        for name, seconds in (
            ("prefill", message.prefill_s),
            ("transfer", message.wire_s + message.verify_s),
            ("transfer_wire", message.wire_s),
            ("transfer_verify", message.verify_s),
            ("transfer_publish", message.publish_s),
            ("exposed_transfer", message.exposed_s),
            ("offer_wait", message.offer_wait_s),
        ):
            self.trace.timings_ms.setdefault(name, seconds * 1000)

    def take(self, run: TokenRun, now: float) -> TokenEvent | None:
        """What of `run` is new to the client. Raises ProtocolBreach on a gap or contradiction, and changes nothing."""
        index, offset, end = run.index, run.offset, run.end  # every look at a message's field costs
        ids, logprobs = tuple(run.ids), run.logprobs
        if not 0 <= index < len(self.samples) or end not in _ENDS:
            raise ProtocolBreach(f"index {index}, end {end!r}")
        sample = self.samples[index]
        if sample.finished:
            return None
        known = len(sample.emitted) - offset
        if known:
            _check_known(index, sample, offset, ids, end)
        if self.request.prompt_logprobs is not None and not self.scored:
            raise ProtocolBreach(f"sample {index} before the log-probability of the prompt's {self.next_scored}.")
        if logprobs and len(logprobs) != len(ids):
            raise ProtocolBreach(f"{len(logprobs)} logprobs for {len(ids)} tokens")
        if offset + len(ids) > self.request.max_tokens:
            raise ProtocolBreach(f"more than {self.request.max_tokens} tokens")
        new = ids[known:] if known else ids
        if new:
            if self.attempt is None or self.attempt.record.first_token_ms is None:
                self._first_token(now)
            sample.emitted.extend(new)
            self.written += len(new)
        elif not end:
            return None
        if end:
            self.sample_ended(sample, now)
        drawn = tuple(_logprob(entry) for entry in logprobs[known:]) if logprobs else ()
        return TokenEvent(index, new, drawn, _ENDS[end])

    def take_scores(self, message: PromptLogprobs, vocab_size: int) -> Scores | None:
        """What of `message` is new to the client. Raises ProtocolBreach as `take` does."""
        if self.request.prompt_logprobs is None:
            raise ProtocolBreach("log-probabilities of a prompt that nobody asked for")
        try:
            scores = read(message, self.request.prompt_logprobs, vocab_size)
        except ValueError as error:
            raise ProtocolBreach(str(error)) from error
        if not 1 <= scores.start <= self.next_scored or scores.end > len(self.request.prompt):
            raise ProtocolBreach(f"log-probabilities {scores.start}..{scores.end}, {self.next_scored} is the next")
        if scores.end <= self.next_scored:
            return None
        new = scores.since(self.next_scored)
        self.next_scored = scores.end
        return new

    def _first_token(self, now: float) -> None:
        """Of the attempt, and perhaps of the request: `prefill` is told by the hand-off, where there is one."""
        record = self._running().record
        record.first_token_ms = self.record.since(now)
        timings = self.trace.timings_ms
        timings.setdefault("ttft", record.first_token_ms)
        if self.trace.prefill_worker == LOCAL and record.accepted_ms is not None:
            timings.setdefault("prefill", record.first_token_ms - record.accepted_ms)

    def sample_ended(self, sample: Sample, now: float) -> None:
        """No more of it is wanted; with the last one the request is complete."""
        sample.finished = True
        if self.complete and "ttft" in self.trace.timings_ms:
            self.trace.timings_ms["decode"] = self.record.since(now) - self.trace.timings_ms["ttft"]

    def exhausted(self) -> list[TokenEvent]:
        """Ends of samples that have all their tokens, but whose end was lost with the worker."""
        events = []
        for index, sample in enumerate(self.samples):
            if not sample.finished and self.scored and len(sample.emitted) >= self.request.max_tokens:
                sample.finished = True
                events.append(TokenEvent(index, (), (), "length"))
        return events

    def leave(self) -> Attempt:
        """running -> waiting: the present attempt is over, the request is not. Returns the attempt."""
        attempt = self._running()
        self.attempt = None
        self.phase = Phase.WAITING
        return attempt

    def end(self) -> Attempt | None:
        """-> ended. Returns the attempt that was running, if any."""
        attempt, self.attempt = self.attempt, None
        self.phase = Phase.ENDED
        return attempt

    def _running(self) -> Attempt:
        self._must_be(Phase.RUNNING)
        if self.attempt is None:
            raise RuntimeError(f"request {self.request.request_id} runs without an attempt")
        return self.attempt

    def _must_be(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise RuntimeError(f"request {self.request.request_id} is {self.phase.value}, not {phase.value}")


def _check_known(index: int, sample: Sample, offset: int, ids: tuple[int, ...], end: str) -> None:
    """A run that does not begin where the last one ended. Raises ProtocolBreach where both cannot be true."""
    known = len(sample.emitted) - offset
    if offset < 0 or known < 0:
        raise ProtocolBreach(f"tokens {len(sample.emitted)}..{offset} of sample {index} are missing")
    if list(ids[:known]) != sample.emitted[offset : offset + len(ids)]:
        raise ProtocolBreach(f"sample {index} contradicts delivered tokens from {offset}")
    if end and len(ids) < known:
        raise ProtocolBreach(f"sample {index} ends before delivered tokens")


def _logprob(entry: ToldLogprob) -> TokenLogprob:
    return TokenLogprob(entry.logprob, tuple((top.id, top.logprob) for top in entry.top))


def _sampling(request: Request) -> Sampling:
    """How a request draws, as workers hear it."""
    how, grammar = request.sampling, request.grammar
    return Sampling(
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        seed=how.seed,
        logprobs=-1 if how.logprobs is None else how.logprobs,
        presence_penalty=how.presence_penalty,
        frequency_penalty=how.frequency_penalty,
        repetition_penalty=how.repetition_penalty,
        min_p=how.min_p,
        min_tokens=how.min_tokens,
        logit_bias=dict(how.logit_bias),
        grammar=None if grammar is None else Grammar(kind=grammar.kind, source=grammar.source),
    )
