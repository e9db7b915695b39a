"""Penalties, bias, min_tokens and grammars: what earlier tokens have to say, against plain definitions."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.core.errors import GrammarError
from engine.messages import DrawRules, Grammar, SampleSpec
from engine.rules import Fold
from engine.sampler import sample_row

V = 12
EOS = V - 1
LOGITS = np.linspace(-3, 3, V, dtype=np.float32)
ONLY_END = np.arange(V) == EOS
Floats = NDArray[np.float32]


def fold(rules: DrawRules, history: Sequence[int], matcher: "Letters | None" = None) -> Fold:
    return Fold(rules, history, vocab_size=V, eos_ids=[EOS], matcher=matcher)


def by_definition(logits: Floats, rules: DrawRules, history: Sequence[int]) -> Floats:
    """Token by token, as engine/rules.py says it in words."""
    written = Counter(history[rules.prompt_tokens :])
    shaped = logits.astype(np.float32).copy()
    if written.total() < rules.min_tokens:
        shaped[[EOS, *rules.stop_token_ids]] = -np.inf
    for token, bias in rules.bias.items():
        shaped[token] += np.float32(bias)
    for token in set(history):
        shaped[token] = (
            shaped[token] / np.float32(rules.repetition)
            if shaped[token] > 0
            else (shaped[token] * np.float32(rules.repetition))
        )
        if token in written:
            shaped[token] -= np.float32(rules.frequency * written[token] + rules.presence)
    return shaped


tokens = st.lists(st.integers(0, V - 1), max_size=12)


@settings(deadline=None)
@given(tokens, tokens, st.integers(0, 12), st.data())
def test_equals_the_definition_wherever_the_fold_begins(
    prompt: list[int], written: list[int], cut: int, data: st.DataObject
) -> None:
    """Whoever starts over any part of the history, and follows the rest, stands where the one stood who saw it all."""
    rules = DrawRules(
        len(prompt),
        presence=data.draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency=data.draw(st.sampled_from([0.0, 0.25, -1.0])),
        repetition=data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        bias=data.draw(st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 1.0, 7.5]), max_size=4)),
        min_tokens=data.draw(st.integers(0, 13)),
        stop_token_ids=(3, 5),
    )
    history = [*prompt, *written]
    cut = min(cut, len(written)) + len(prompt)
    mine = fold(rules, history[:cut])
    for position in range(cut, len(history)):
        mine.follow(position, history[position : position + 1])
    np.testing.assert_allclose(mine.shape(LOGITS), by_definition(LOGITS, rules, history), rtol=1e-5)
    mine.follow(len(history) - 1, history[-1:])  # a position that is run again is not counted twice
    np.testing.assert_allclose(mine.shape(LOGITS), by_definition(LOGITS, rules, history), rtol=1e-5)


def test_the_logits_themselves_stay_as_they_came_and_logprobs_are_theirs() -> None:
    logits = LOGITS.copy()
    shaped = fold(DrawRules(0, bias={2: 100.0}), []).shape(logits)
    [drawn] = sample_row(logits, [SampleSpec(0, 0, 0.0, 1.0, 0, 1)], 1, shaped)
    assert drawn.token == 2
    assert (logits == LOGITS).all()
    norm = float(np.log(np.exp(LOGITS.astype(np.float64)).sum()))
    assert drawn.logprob == pytest.approx(float(LOGITS[2]) - norm, abs=1e-5)
    assert drawn.top[0][0] == V - 1


def test_a_gap_in_what_was_written_is_seen() -> None:
    mine = fold(DrawRules(2, presence=1.0), [1, 2, 3])
    with pytest.raises(ValueError, match=r"positions 3\.\.4 are missing"):
        mine.follow(5, [4])


@pytest.mark.parametrize(
    "rules",
    [
        DrawRules(0, bias={V: 1.0}),
        DrawRules(0, bias={-1: 1.0}),
        DrawRules(0, min_tokens=1, stop_token_ids=(V,)),
        DrawRules(2),
        DrawRules(0, grammar=Grammar("regex", "a")),
    ],
)
def test_impossible_rules_are_refused(rules: DrawRules) -> None:
    with pytest.raises(ValueError, match=r"not within|beyond|matcher"):
        fold(rules, [1])


class Letters:
    """A grammar of exactly so many letters, ids 0..8."""

    def __init__(self, left: int) -> None:
        self.left = left

    def consume(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self.left or any(token > 8 for token in tokens):
            raise GrammarError("no letter")
        self.left -= len(tokens)

    def allowed(self) -> NDArray[np.bool_]:
        return np.arange(V) <= 8 if self.left else ONLY_END.copy()


def test_a_grammar_allows_and_its_end_is_the_end() -> None:
    mine = fold(DrawRules(3, grammar=Grammar("lark", "")), [9, 9, 9, 4], Letters(2))
    assert np.isfinite(mine.shape(LOGITS)).tolist() == [True] * 9 + [False] * 3
    mine.follow(4, [0])
    assert np.isfinite(mine.shape(LOGITS)).tolist() == ONLY_END.tolist()
    with pytest.raises(GrammarError):
        mine.follow(5, [1])


def test_min_tokens_gives_way_where_the_grammar_has_nothing_but_its_end() -> None:
    rules = DrawRules(0, min_tokens=10, stop_token_ids=(7,), grammar=Grammar("lark", ""))
    mine = fold(rules, [], Letters(1))
    assert np.flatnonzero(np.isfinite(mine.shape(LOGITS))).tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    mine.follow(0, [1])
    assert np.flatnonzero(np.isfinite(mine.shape(LOGITS))).tolist() == [EOS]
