"""Admission on a decode worker: an atomic reservation, a short wait line, proof of prefix hits (DESIGN §4.5).

1. check     what can never fit, or is malformed, is refused for good (the router checked too; we trust nobody)
2. reserve   match the prefix index, pin the hits, own every other block of prompt and first step, or nothing
3. wait      without room up to `wait_line` attempts wait, oldest arrival first; the rest is refused
4. prove     `verify: full` digests the hits again; a wrong one leaves the index, and the rest is computed afresh.
             Meanwhile the engine makes the grammar ready, where there is one
"""

import math
from collections.abc import Callable

from cluster.core.keys import KeyChain, root_key
from cluster.stubs.common_pb2 import Blame
from cluster.stubs.session_pb2 import AttemptRefused, FromDecode, Submit
from decode_worker.attempts import Attempt, Phase, make_attempt, rules, spec
from decode_worker.state import State
from engine.asked import sampling_problem, scoring_problem
from engine.messages import Digest, DigestDone, Prepare, Prepared
from engine.prefix import keep_right_hits
from engine.questions import Questions
from engine.scoring import usable_blocks
from engine.sequence import MAX_SAMPLES, Sequence

RETRY_AFTER_S = 0.05  # a few steps: by then something may have ended


class Admission:
    """The door of one decode worker."""

    def __init__(
        self,
        state: State,
        admitted: Callable[[Attempt, float], None],
        failed: Callable[[Attempt, str, "Blame.ValueType", float], None],
        doubted: Callable[[list[int]], None],
    ) -> None:
        self._state = state
        self._admitted = admitted
        self._failed = failed
        self._doubted = doubted
        self._checks: Questions[Attempt] = Questions("digests")
        self._preparing: Questions[Attempt] = Questions("grammar")

    def submit(self, router: int, submit: Submit, now: float) -> None:
        """A new attempt: admit it, let it wait, or refuse it."""
        state = self._state
        problem = self._problem(submit)
        if state.sessions.find_ended(router, submit.attempt) is not None:
            problem = "attempt id was used, and its end is not settled"
        if problem is not None:
            self._refuse(router, submit.attempt, problem, permanent=True)
            return
        attempt = make_attempt(router, submit, now)
        if self._blocks_needed(attempt, worst=True) > state.books.num_blocks:
            needed = self._blocks_needed(attempt, worst=True)
            reason = f"needs {needed} blocks, this worker has {state.books.num_blocks}"
            self._refuse(router, submit.attempt, reason, permanent=True)
            return
        waiting = self._waiting()
        if state.draining or (waiting and len(waiting) >= state.config.handoff.wait_line):
            self._refuse(router, submit.attempt, "draining" if state.draining else "full", permanent=False)
            return
        state.attempts[attempt.id] = attempt
        overtakes = any(w.arrival < attempt.arrival for w in waiting)
        if overtakes or not self._reserve(attempt, now):
            if state.config.handoff.wait_line == 0:
                del state.attempts[attempt.id]
                self._refuse(router, submit.attempt, "full", permanent=False)
            else:
                state.counters["waited_for_room"] += 1

    def turn_away(self) -> None:
        """This worker drains: nobody waits for room any more."""
        for attempt in self._waiting():
            del self._state.attempts[attempt.id]
            self._refuse(attempt.router, attempt.id, "draining", permanent=False)

    @property
    def checking(self) -> bool:
        """Whether the engine owes digests of prefix hits."""
        return bool(self._checks)

    def admit_waiting(self, now: float) -> None:
        """Room may have come: let the wait line in, oldest arrival first, nobody past the first that does not fit."""
        for attempt in sorted(self._waiting(), key=lambda a: a.arrival):
            if not self._reserve(attempt, now):
                return

    def digests(self, report: DigestDone, now: float) -> None:
        """The bytes of an attempt's prefix hits, as they are now."""
        attempt = self._checks.answered(report.id)
        if self._state.attempts.get(attempt.id) is not attempt or attempt.phase is not Phase.CHECKING:
            return
        assert attempt.prompt is not None
        books, hits = self._state.books, attempt.prefix_blocks
        right, room, doubted = keep_right_hits(books, attempt.prompt, hits, report.digests)
        self._doubted(doubted)
        if not room:
            self._failed(attempt, "no room to replace a prefix block that failed its check", Blame.BLAME_WORKER, now)
            return
        if right < attempt.prefix_blocks:
            self._state.counters["prefix_hit_corrupt"] += 1
            attempt.prefix_blocks = right
        self._checked_off(attempt, now)

    def prepared(self, report: Prepared, now: float) -> None:
        """The engine can keep an attempt's draws to its grammar, or cannot."""
        attempt = self._preparing.answered(report.id)
        if self._state.attempts.get(attempt.id) is not attempt:
            return
        if report.error:
            self._failed(attempt, report.error, Blame.BLAME_REQUEST, now)
        else:
            self._checked_off(attempt, now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[Attempt]:
        return [a for a in self._state.attempts.values() if a.phase is Phase.WAITING]

    def _problem(self, submit: Submit) -> str | None:
        """Why this attempt can never be served, or None."""
        facts = self._state.facts
        if not submit.attempt or submit.attempt in self._state.attempts:
            return "attempt id is empty or in use"
        if not submit.prompt or not 1 <= len(submit.samples) <= MAX_SAMPLES or submit.max_tokens < 0:
            return "an attempt needs a prompt, 1 to 128 samples and max_tokens of at least 0"
        if len(submit.prompt) + submit.max_tokens > facts.max_context:
            return f"{len(submit.prompt)} + {submit.max_tokens} tokens exceed the context of {facts.max_context}"
        histories = [t for s in submit.samples for t in s.emitted]
        if any(not 0 <= t < facts.vocab_size for t in (*submit.prompt, *histories)):
            return f"a token id is outside the vocabulary of {facts.vocab_size}"
        if any(len(s.emitted) >= max(1, submit.max_tokens) and not s.finished for s in submit.samples):
            return "a sample's history is longer than max_tokens"
        if all(s.finished for s in submit.samples):
            return "every sample has finished"
        if any(not 0 <= t < facts.vocab_size for t in submit.stop_token_ids):
            return f"a stop token id is outside the vocabulary of {facts.vocab_size}"
        if problem := sampling_problem(submit.sampling, facts.vocab_size):
            return problem
        chunk = self._state.batcher.budget.chunk_tokens
        asked, length = submit.score, len(submit.prompt)
        if submit.HasField("score") and (problem := scoring_problem(asked, length, facts.vocab_size, chunk)):
            return problem
        if not (math.isfinite(submit.deadline_s) and math.isfinite(submit.waited_s) and submit.waited_s >= 0):
            return "deadline_s and waited_s must be finite, waited_s not negative"
        return None

    def _blocks_needed(self, attempt: Attempt, *, worst: bool) -> int:
        """Blocks of the prompt and of each sample's first step; with `worst`, of everything it may ever write."""
        size = self._state.block_size
        shared = len(attempt.prompt_ids) // size
        return shared + sum(self._private_blocks(attempt, s.index, worst=worst) for s in attempt.live)

    def _private_blocks(self, attempt: Attempt, index: int, *, worst: bool) -> int:
        """Blocks of one sample beyond the full blocks of the prompt."""
        size = self._state.block_size
        emitted = len(attempt.samples[index].emitted)
        most = attempt.submit.max_tokens
        tokens = len(attempt.submit.prompt) + (most if worst else min(most, emitted + 1))
        return -(-tokens // size) - len(attempt.prompt_ids) // size

    def _reserve(self, attempt: Attempt, now: float) -> bool:
        """All blocks or none. On success the attempt leaves the wait line."""
        state = self._state
        books, size = state.books, state.block_size
        chain = KeyChain(root_key(state.facts.identity.fingerprint, salt=attempt.submit.salt), size)
        usable = chain.extend(attempt.prompt_ids)[: usable_blocks(len(attempt.prompt_ids), size, attempt.scoring)]
        prompt = Sequence(
            id=state.batcher.new_id(),
            tokens=list(attempt.prompt_ids),
            chain=chain,
            draws=[spec(attempt.submit, s.index) for s in attempt.undrawn],
            arrival=attempt.arrival,
            rules=rules(attempt.submit),
            scoring=attempt.scoring,
        )
        hits = books.match(usable)
        books.share(hits, prompt.owner)
        needed = self._blocks_needed(attempt, worst=attempt.protected) - len(hits)
        watermark = len(state.batcher.sequences)
        if needed + watermark > books.available and not (watermark == 0 and needed <= books.available):
            books.release(hits, prompt.owner)
            return False
        taken = books.allocate(needed, prompt.owner)
        if taken is None:
            books.release(hits, prompt.owner)
            return False
        self._hand_out(attempt, prompt, hits, taken)
        state.batcher.add(prompt)
        attempt.prompt, attempt.prefix_blocks = prompt, len(hits)
        prompt.computed = len(hits) * size
        self._check(attempt, now)
        return True

    def _hand_out(self, attempt: Attempt, prompt: Sequence, hits: list[int], taken: list[int]) -> None:
        """Split the reservation: the first live sample will take the prompt over, the others get private blocks."""
        books, size = self._state.books, self._state.block_size
        shared = len(attempt.prompt_ids) // size - len(hits)
        first, *others = attempt.live
        mine = shared + self._private_blocks(attempt, first.index, worst=attempt.protected)
        prompt.blocks = hits + taken[:mine]
        at = mine
        for sample in others:
            count = self._private_blocks(attempt, sample.index, worst=attempt.protected)
            tokens = list(attempt.submit.prompt) + sample.emitted
            sequence = Sequence(
                id=self._state.batcher.new_id(),
                tokens=tokens,
                chain=KeyChain(root_key(self._state.facts.identity.fingerprint, salt=attempt.submit.salt), size),
                draws=[spec(attempt.submit, sample.index)],
                arrival=attempt.arrival,
                rules=prompt.rules,
                blocks=taken[at : at + count],
            )
            books.share(sequence.blocks, sequence.owner)
            books.release(sequence.blocks, prompt.owner)
            self._state.batcher.add(sequence)
            sample.sequence = sequence
            at += count

    def _check(self, attempt: Attempt, now: float) -> None:
        prompt = attempt.prompt
        assert prompt is not None
        attempt.phase = Phase.CHECKING
        attempt.awaited = 1
        if attempt.prefix_blocks and self._state.config.engine.verify == "full":
            attempt.awaited += 1
            self._state.to_engine(Digest(self._checks.ask(attempt), prompt.blocks[: attempt.prefix_blocks]))
        if prompt.grammar is not None:
            attempt.awaited += 1
            self._state.to_engine(Prepare(self._preparing.ask(attempt), prompt.grammar))
        self._checked_off(attempt, now)

    def _checked_off(self, attempt: Attempt, now: float) -> None:
        """One thing less that the attempt waits for."""
        attempt.awaited -= 1
        if not attempt.awaited:
            self._proved(attempt, now)

    def _proved(self, attempt: Attempt, now: float) -> None:
        assert attempt.prompt is not None
        attempt.prompt.computed = attempt.prefix_blocks * self._state.block_size
        self._state.counters["prefix_hit_tokens"] += attempt.prompt.computed
        self._admitted(attempt, now)

    def _refuse(self, router: int, attempt: str, reason: str, *, permanent: bool) -> None:
        state = self._state
        state.counters["refused_for_good" if permanent else "refused_for_now"] += 1
        message = AttemptRefused(
            attempt=attempt,
            reason=reason,
            free_blocks=state.books.available,
            retry_after_s=RETRY_AFTER_S,
            permanent=permanent,
        )
        state.sessions.send(router, FromDecode(refused=message))
