"""What a Submit or a Job asks of a draw, in the engine's terms; the same on prefill and decode workers (I5).

The messages are the generated ones of proto/common.proto; this package knows only their shape.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.messages import DrawRules, Grammar, SampleSpec
from engine.scoring import Scoring

GRAMMAR_KINDS = frozenset({"json_object", "json_schema", "regex", "lark"})
MAX_GRAMMAR_CHARACTERS = 1 << 20  # routers have a tighter bound of their own
MAX_BIASED = 4096  # as above
MAX_SCORES = 1 << 20  # log-probabilities that one step may tell of a prompt's tokens: 8 MB
_LIMIT = 100.0  # of a penalty and of a bias, either way


class GrammarMessage(Protocol):
    """`Grammar` of proto/common.proto."""

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> str: ...


class ScoreMessage(Protocol):
    """`ScorePrompt` of proto/common.proto."""

    @property
    def top(self) -> int: ...
    @property
    def start(self) -> int: ...


class SamplingMessage(Protocol):
    """`Sampling` of proto/common.proto."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def logprobs(self) -> int: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def grammar(self) -> GrammarMessage: ...


def spec_of(asked: SamplingMessage, index: int) -> SampleSpec:
    """How sample `index` draws."""
    return SampleSpec(index, asked.seed, asked.temperature, asked.top_p, asked.top_k, asked.logprobs, asked.min_p)


def rules_of(asked: SamplingMessage, prompt_tokens: int, stop_token_ids: Sequence[int]) -> DrawRules | None:
    """What earlier tokens have to say about the draws of this request; None when they have no say."""
    grammar = Grammar(asked.grammar.kind, asked.grammar.source) if asked.grammar.kind else None
    rules = DrawRules(
        prompt_tokens,
        presence=asked.presence_penalty,
        frequency=asked.frequency_penalty,
        repetition=asked.repetition_penalty or 1.0,
        bias=dict(asked.logit_bias),
        min_tokens=asked.min_tokens,
        stop_token_ids=tuple(stop_token_ids) if asked.min_tokens else (),
        grammar=grammar,
    )
    return None if rules == DrawRules(prompt_tokens) else rules


def scoring_of(asked: ScoreMessage, prompt_tokens: int) -> Scoring:
    """What is wanted of the prompt's own tokens."""
    return Scoring(asked.top, asked.start, prompt_tokens)


def scoring_problem(asked: ScoreMessage, prompt_tokens: int, vocab_size: int, chunk_tokens: int) -> str | None:
    """Why no worker with steps of `chunk_tokens` positions can tell that, or None."""
    if not 0 <= asked.top <= vocab_size or chunk_tokens * (1 + asked.top) > MAX_SCORES:
        return f"prompt logprobs cannot name the {asked.top} most likely tokens"
    if not 1 <= asked.start <= prompt_tokens:
        return f"prompt logprobs from {asked.start} on are not within {prompt_tokens} tokens"
    return None


def sampling_problem(asked: SamplingMessage, vocab_size: int) -> str | None:
    """Why no worker of this model can draw so, or None. NaN is in no range."""
    if not (0 <= asked.temperature <= _LIMIT and 0 < asked.top_p <= 1 and asked.top_k >= 0 and 0 <= asked.min_p <= 1):
        return "sampling parameters are out of range"
    if not -1 <= asked.logprobs <= vocab_size:
        return "logprobs is out of range"
    penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    if not all(abs(penalty) <= _LIMIT for penalty in penalties) or asked.repetition_penalty < 0:
        return "a penalty is out of range"
    if asked.min_tokens < 0:
        return "min_tokens is out of range"
    if len(asked.logit_bias) > MAX_BIASED:
        return f"{len(asked.logit_bias)} tokens are biased, at most {MAX_BIASED} may be"
    if not all(0 <= token < vocab_size and math.fabs(bias) <= _LIMIT for token, bias in asked.logit_bias.items()):
        return "logit_bias is out of range"
    return _grammar_problem(asked.grammar)


def _grammar_problem(grammar: GrammarMessage) -> str | None:
    if grammar.kind and grammar.kind not in GRAMMAR_KINDS:
        return "the grammar's kind is unknown"
    if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
        return "the grammar is too long"
    return None
