"""What earlier tokens have to say about a draw: a pure fold over the prompt and the tokens written so far.

    Fold(rules, history)    everything up to the first draw here: prompt, and what other workers have written
    follow(start, tokens)   each token that was written after it
    shape(logits)           the logits that a draw is made from

A sample that starts on another worker - after a hand-off, a pre-emption, a failover - starts this fold over its history
and stands where it stood: no state travels that could be swallowed twice or lost (FAULTS C18).

`shape`, in this order:
1. what may not be drawn becomes minus infinity: before `min_tokens`, end-of-sequence tokens and stop_token_ids; under
   a grammar, whatever it does not allow here. Its end allows the end-of-sequence tokens, and nothing else does. Where
   only the end is left, it comes even before `min_tokens`.
2. logit_bias is added.
3. Repetition penalty (Keskar et al. 2019), over prompt and written tokens alike: a positive logit is divided by it, a
   negative one multiplied. Then, over written tokens alone, as OpenAI defines them: minus frequency * count, minus
   presence once.
Shapes: V vocabulary, n distinct tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import DrawRules

FloatsV = NDArray[np.float32]
MaskV = NDArray[np.bool_]


class Matcher(Protocol):
    """Where one sample stands in its grammar (engine/grammar.py)."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that were written. Raises GrammarError when the grammar does not allow them."""

    def allowed(self) -> MaskV:
        """[V]: what may come next; end-of-sequence tokens where the grammar may end. Raises GrammarError."""


class Fold:
    """The fold of one sequence. Raises ValueError for rules that no vocabulary of this size can keep."""

    def __init__(
        self,
        rules: DrawRules,
        history: Sequence[int],
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        matcher: Matcher | None = None,
    ) -> None:
        named = [*rules.bias, *rules.stop_token_ids]
        if named and not 0 <= min(named) <= max(named) < vocab_size:
            raise ValueError(f"a biased or stop token id is not within [0, {vocab_size})")
        if not 0 <= rules.prompt_tokens <= len(history):
            raise ValueError(f"the prompt ends at {rules.prompt_tokens}, beyond a history of {len(history)}")
        if rules.grammar is not None and matcher is None:
            raise ValueError("a grammar without its matcher")
        self._rules = rules
        self._matcher = matcher
        self._ends = np.array(sorted({*eos_ids, *rules.stop_token_ids}), np.int64)
        self._biased = np.array(list(rules.bias), np.int64)
        self._biases = np.array(list(rules.bias.values()), np.float32)
        penalised = rules.repetition != 1 or rules.presence != 0 or rules.frequency != 0
        self._counts = _Counts() if penalised else None
        self._length = rules.prompt_tokens
        if self._counts is not None:
            self._counts.add(history[: rules.prompt_tokens], 0)
        self.follow(rules.prompt_tokens, history[rules.prompt_tokens :])

    def follow(self, start: int, tokens: Sequence[int]) -> None:
        """Take `tokens` at positions `start`, `start + 1`, ... A position that was taken is not taken again.

        Raises ValueError for a gap, and for tokens that the grammar does not allow.
        """
        if start > self._length:
            raise ValueError(f"positions {self._length}..{start - 1} are missing from what was written")
        new = tokens[self._length - start :]
        self._length += len(new)
        if self._counts is not None:
            self._counts.add(new, 1)
        if self._matcher is not None and new:
            self._matcher.consume(new)

    def shape(self, logits_V: FloatsV) -> FloatsV:
        """What a draw is made from: new logits [V]. Raises ValueError when the grammar cannot go on."""
        shaped_V = logits_V.copy()
        early = self._length - self._rules.prompt_tokens < self._rules.min_tokens
        if self._matcher is not None:
            allowed_V = self._matcher.allowed()
            if early:
                allowed_V = _without(allowed_V, self._ends)
            shaped_V[~allowed_V] = -np.inf
        elif early:
            shaped_V[self._ends] = -np.inf
        shaped_V[self._biased] += self._biases
        if self._counts is not None:
            self._counts.penalise(shaped_V, self._rules)
        return shaped_V


def _without(allowed_V: MaskV, ends: NDArray[np.int64]) -> MaskV:
    """Without the ends, unless nothing else is left."""
    fewer_V = allowed_V.copy()
    fewer_V[ends] = False
    return fewer_V if fewer_V.any() else allowed_V


class _Counts:
    """Every distinct token of prompt and text, and how often it was written: O(1) a token, O(n) a draw."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._written = np.empty(64, np.float32)

    def add(self, tokens: Sequence[int], times: int) -> None:
        """Each of `tokens`; `times` is 0 for those of the prompt."""
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * place)
                    self._written = np.resize(self._written, 2 * place)
                self._ids[place], self._written[place] = token, 0
            self._written[place] += times

    def penalise(self, logits_V: FloatsV, rules: DrawRules) -> None:
        """In place."""
        ids_n, written_n = self._ids[: len(self._places)], self._written[: len(self._places)]
        logits_n = logits_V[ids_n]
        factor = np.float32(rules.repetition)
        logits_n = np.where(logits_n > 0, logits_n / factor, logits_n * factor)
        logits_n -= np.float32(rules.frequency) * written_n + np.float32(rules.presence) * (written_n > 0)
        logits_V[ids_n] = logits_n
