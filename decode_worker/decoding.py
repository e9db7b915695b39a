"""From a complete prompt to the last token: results of steps, ends, pre-emption (DESIGN §4.9-4.12)."""

from cluster.core.errors import IntegrityError
from cluster.scores import messages as score_messages
from cluster.stubs.common_pb2 import Blame, PromptLogprobs, TokenLogprob
from cluster.stubs.link_pb2 import First
from cluster.stubs.session_pb2 import AttemptFailed, FromDecode, Preempted
from decode_worker import lines
from decode_worker.attempts import Attempt, Phase, Sample, spec
from decode_worker.handoffs import HandOffs
from decode_worker.outbox import logprob_message
from decode_worker.peers import Peers
from decode_worker.state import State
from engine.batcher import RowResult
from engine.messages import StepDone
from engine.sequence import Sequence


class Decoding:
    """Attempts whose tokens are written here."""

    def __init__(self, state: State, peers: Peers, handoffs: HandOffs) -> None:
        self._state = state
        self._peers = peers
        self._handoffs = handoffs
        self._of: dict[int, tuple[Attempt, Sample | None]] = {}  # sequence id -> whose it is

    # -- starting -------------------------------------------------------------------------------------------------

    def prefill_here(self, attempt: Attempt) -> None:
        """Compute the rest of the prompt on this worker, from `prompt.computed` on."""
        prompt = attempt.prompt
        assert prompt is not None
        attempt.phase = Phase.PREFILLING
        undrawn = attempt.undrawn
        prompt.draws = [spec(attempt.submit, s.index) for s in undrawn]
        self._of[prompt.id] = (attempt, None)
        if self._is_read(attempt):
            self.begin(attempt)
        else:
            prompt.runnable = True

    def remote_first(self, attempt: Attempt, message: First) -> None:
        """First tokens drawn by the prefill worker: forwarded at once, and history from now on."""
        undrawn = {s.index for s in attempt.undrawn}
        for token in message.tokens:
            if token.index in undrawn:
                logprob = token.logprob if token.HasField("logprob") else None
                self._emit(attempt, attempt.samples[token.index], token.id, logprob)
        self._end_if_done(attempt)

    def scored(self, attempt: Attempt, message: PromptLogprobs) -> None:
        """Log-probabilities of the prompt's next tokens, whoever computed them: forwarded at once."""
        wanted = attempt.scoring
        assert wanted is not None
        wanted.next += len(message.ranks) // 4
        self._state.to_router(attempt, FromDecode(scored=message))
        if wanted.done and attempt.reads_only:
            self.end_unwritten(attempt)

    def end_unwritten(self, attempt: Attempt) -> None:
        """Nothing is to be written, and all that was asked of the prompt is told."""
        self._runs(attempt)
        for sample in attempt.live:
            sample.end = "length"
            self._state.sessions.end(attempt, sample)
            self._finish(attempt, sample)
        self.leave(attempt)

    def begin(self, attempt: Attempt) -> None:
        """Every position of the prompt is usable and every first token is known: write the rest."""
        prompt = attempt.prompt
        assert prompt is not None
        attempt.phase = Phase.DECODING
        prompt.runnable = False
        heir = next((s for s in attempt.live if s.sequence is None), None)
        shared = prompt.blocks[: self._full(attempt) // self._state.block_size]
        for sample in attempt.samples:
            if sample is heir:
                sample.sequence = prompt
                prompt.tokens = list(attempt.submit.prompt) + sample.emitted
                prompt.draws = [spec(attempt.submit, sample.index)]
            elif sample.sequence is not None and not sample.finished:
                self._state.books.share(shared, sample.sequence.owner)
                sample.sequence.blocks = shared + sample.sequence.blocks
                sample.sequence.computed = self._full(attempt)
                sample.sequence.tokens = list(attempt.submit.prompt) + sample.emitted
        if heir is None:
            self._drop(prompt)
            attempt.prompt = None
        for sample in attempt.live:
            assert sample.sequence is not None
            self._of[sample.sequence.id] = (attempt, sample)
            sample.sequence.runnable = True

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_done(self, done: StepDone) -> None:
        """Give every row's result to its sample."""
        results = self._state.batcher.on_done(done)
        self._state.counters["steps"] += 1
        for result in results:
            owner = self._of.get(result.sequence.id)
            if owner is None or owner[0].id not in self._state.attempts:
                continue
            attempt, sample = owner
            if result.error is not None:
                self.fail(
                    attempt, result.error.reason, Blame.BLAME_REQUEST if result.error.refused else Blame.BLAME_UNSETTLED
                )
            elif sample is None:
                self._prompt_row(attempt, result)
            elif not sample.finished and result.sampled:
                drawn = result.sampled[0]
                self._emit(attempt, sample, drawn.token, logprob_message(drawn))
                result.sequence.tokens.append(drawn.token)
                self._end_if_done(attempt)

    def _prompt_row(self, attempt: Attempt, result: RowResult) -> None:
        """A chunk of a prompt that is computed here."""
        prompt = result.sequence
        self._state.counters["prompt_tokens_computed"] += result.written
        if result.scored is not None and prompt.scoring is not None:
            arrays = (result.scored.logprobs, result.scored.ids, result.scored.ranks)
            for message in score_messages(attempt.id, prompt.scoring.next, result.scored.top, *arrays):
                self.scored(attempt, message)
        for specification, drawn in zip(prompt.draws, result.sampled, strict=False):
            self._emit(attempt, attempt.samples[specification.index], drawn.token, logprob_message(drawn))
        self._end_if_done(attempt)
        if attempt.id not in self._state.attempts:
            return
        if result.sampled or (not prompt.draws and self._is_read(attempt)):
            self.begin(attempt)

    # -- ending ---------------------------------------------------------------------------------------------------

    def stop_sample(self, attempt: Attempt, index: int) -> None:
        """The router found this sample's end: no more tokens of it."""
        if 0 <= index < len(attempt.samples):
            self._finish(attempt, attempt.samples[index])
            self._end_if_done(attempt)

    def fail(self, attempt: Attempt, reason: str, blame: "Blame.ValueType") -> None:
        """This worker cannot go on with the attempt."""
        self._state.counters["attempts_failed"] += 1
        lines.failed(attempt, blame)
        message = AttemptFailed(attempt=attempt.id, reason=reason, blame=blame)
        self._state.to_router(attempt, FromDecode(failed=message))
        self.leave(attempt)

    def leave(self, attempt: Attempt) -> None:
        """The attempt owns nothing from now on. Valid in every phase, twice as well."""
        if self._state.attempts.pop(attempt.id, None) is None:
            return
        self._handoffs.cancel(attempt)
        for sequence in attempt.sequences():
            self._drop(sequence)
        self._state.sessions.ended(attempt)

    def make_room(self, wanting: Sequence) -> bool:
        """A running sequence needs a block: pre-empt the youngest attempt that may be. True when one was."""
        holding = [a for a in self._state.attempts.values() if a.phase is not Phase.WAITING and a.sequences()]
        victims = [a for a in holding if not a.protected]
        if not victims:
            owner = self._of.get(wanting.id)
            if owner is not None:
                self.fail(owner[0], "the pool has no room for what is protected from pre-emption", Blame.BLAME_WORKER)
            return False
        victim = max(victims, key=lambda a: (a.arrival, a.id))
        self._state.counters["preempted"] += 1
        lines.preempted(victim)
        self.give_back(victim, draining=False)
        return True

    def give_back(self, attempt: Attempt, *, draining: bool) -> None:
        """Its router goes on with it, here or elsewhere; the tokens drawn so far reach it first."""
        self._state.to_router(attempt, FromDecode(preempted=Preempted(attempt=attempt.id, draining=draining)))
        self.leave(attempt)

    def check_integrity(self) -> None:
        """Sequences belong to living attempts, and living attempts to their sequences."""
        owned = {s.id for a in self._state.attempts.values() for s in a.sequences()}
        if set(self._state.batcher.sequences) != owned:
            raise IntegrityError(f"sequences {set(self._state.batcher.sequences) ^ owned} have no attempt, or no entry")
        if not set(self._of) <= owned:
            raise IntegrityError("a sequence that is gone still has an owner")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_read(self, attempt: Attempt) -> bool:
        """Whether its full blocks are there, and nothing else is wanted of the prompt."""
        assert attempt.prompt is not None
        return not attempt.owed and attempt.prompt.computed >= self._full(attempt)

    def _full(self, attempt: Attempt) -> int:
        """Positions of the prompt's full blocks."""
        return len(attempt.prompt_ids) // self._state.block_size * self._state.block_size

    def _runs(self, attempt: Attempt) -> None:
        """The attempt can be served, so who could not run it had a fault."""
        if attempt.suspects:
            self._peers.convict(attempt.suspects)
            attempt.suspects = []

    def _emit(self, attempt: Attempt, sample: Sample, token: int, logprob: TokenLogprob | None) -> None:
        """One more token of a sample, into its router's outbox; the sample may end by it."""
        if sample.finished:
            return
        sample.emitted.append(token)
        self._runs(attempt)
        end = self._end_reason(attempt, sample, token)
        if logprob is not None:
            sample.logprobs.append(logprob)
        sample.end = end
        self._state.counters["tokens_out"] += 1
        self._state.sessions.token(attempt, sample)
        if end:
            self._finish(attempt, sample)

    def _end_reason(self, attempt: Attempt, sample: Sample, token: int) -> str:
        """Why the sample ends with this token: "eos", "stop", "length", or "" when it goes on."""
        submit, facts = attempt.submit, self._state.facts
        if token in facts.eos_ids and not submit.ignore_eos:
            return "eos"
        if token in submit.stop_token_ids:
            return "stop"
        if len(sample.emitted) >= submit.max_tokens or len(submit.prompt) + len(sample.emitted) >= facts.max_context:
            return "length"
        return ""

    def _end_if_done(self, attempt: Attempt) -> None:
        if not attempt.live:
            self.leave(attempt)

    def _drop(self, sequence: Sequence) -> None:
        self._of.pop(sequence.id, None)
        self._state.batcher.remove(sequence)

    def _finish(self, attempt: Attempt, sample: Sample) -> None:
        """This sample wants no more tokens; its blocks go, unless others still need the prompt in them."""
        sample.finished = True
        if sample.sequence is not None:
            self._drop(sample.sequence)
            if sample.sequence is attempt.prompt:
                attempt.prompt = None
            sample.sequence = None
