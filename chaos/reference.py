"""The judge of a chaos run: what each request must be answered with.

Tracer: computed in plain integers from the prompt alone. Any other model: what the same cluster answered before
anything was disturbed, in float32, where batches and prefix hits change no token but at a near-tie; greedy prompts
whose top two candidates ever come closer than MARGIN are therefore not asked.
"""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from chaos.ask import Ask, Rules
from cluster.core.grammar import GrammarMatcher, tracer_vocabulary
from engine.messages import DrawRules, Grammar, SampleSpec, TracerModel
from engine.model.tracer import reference_logprobs, reference_tokens

MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class Expected:
    """One sample: its tokens (the ending one included), the text they are, why they end, each token's logprob."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[float, ...]


class Reference(Protocol):
    """Knows every answer."""

    def answer(self, ask: Ask) -> tuple[Expected, ...]:
        """One per choice, in the order of their indices."""


class TracerReference:
    """Computes answers as long as there is room to remember a few."""

    def __init__(self, spec: TracerModel) -> None:
        self._spec = spec
        self._vocabulary = tracer_vocabulary(spec.vocab_size)
        self.answer = lru_cache(maxsize=4096)(self._answer)

    def _answer(self, ask: Ask) -> tuple[Expected, ...]:
        return tuple(self._sample(ask, prompt, index) for prompt in ask.prompts for index in range(ask.n))

    def _sample(self, ask: Ask, prompt: tuple[int, ...], index: int) -> Expected:
        sampling = SampleSpec(index, ask.seed, ask.temperature, ask.top_p, ask.top_k, -1, ask.rules.min_p)
        rules = _rules(ask.rules, len(prompt))
        start = None if rules.grammar is None else self._start(rules.grammar)
        tokens = reference_tokens(
            list(prompt),
            ask.max_tokens,
            self._spec,
            sampling,
            stop_at_eos=not ask.ignore_eos,
            rules=None if rules == DrawRules(len(prompt)) else rules,
            grammar=None if start is None else start.copy,
        )
        ended = not ask.ignore_eos and tokens[-1] == self._spec.vocab_size - 1
        spelt = [_bytes_of(token) for token in (tokens[:-1] if ended else tokens)]
        text, reason = b"".join(spelt).decode("utf-8", "replace"), "stop" if ended else "length"
        if (stopped := _stopped(spelt, ask.stop, ask.rules.min_tokens)) is not None:
            count, text = stopped
            tokens, reason = tokens[:count], "stop"
        return Expected(tuple(tokens), text, reason, self._logprobs(prompt, tokens) if ask.logprobs is not None else ())

    def _logprobs(self, prompt: tuple[int, ...], tokens: list[int]) -> tuple[float, ...]:
        """Of each token, as the model itself has them."""
        rows = reference_logprobs([*prompt, *tokens[:-1]], self._spec)[len(prompt) - 1 :]
        return tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))

    def _start(self, grammar: Grammar) -> GrammarMatcher:
        return self._vocabulary.compile(grammar.kind, grammar.source)


class RecordedReference:
    """Answers that were written down."""

    def __init__(self, answers: Mapping[Ask, tuple[Expected, ...]]) -> None:
        self._answers = answers

    @property
    def asks(self) -> list[Ask]:
        return list(self._answers)

    def answer(self, ask: Ask) -> tuple[Expected, ...]:
        return self._answers[ask]


def _stopped(spelt: list[bytes], stops: tuple[str, ...], passed_over: int) -> tuple[int, str] | None:
    """How many tokens there are when the first stop string is complete, and the text before it; None: there is none.

    One that the first `passed_over` tokens complete is text like any other.
    """
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, part in enumerate(spelt, start=1):
        before = len(text)
        text += decoder.decode(part)
        for end in range(before + 1, len(text) + 1):
            longest = max((len(stop) for stop in stops if text.endswith(stop, 0, end)), default=0)
            if longest and count > passed_over:
                return count, text[: end - longest]
    return None


def _bytes_of(token: int) -> bytes:
    """How the tracer spells a token: bytes are themselves, everything else is written `<id>`."""
    return bytes((token,)) if token < 256 else b"<%d>" % token


def _rules(asked: Rules, prompt_tokens: int) -> DrawRules:
    """In the engine's terms."""
    source = Grammar("json_schema", asked.json_schema) if asked.json_schema else Grammar("regex", asked.regex)
    return DrawRules(
        prompt_tokens,
        presence=asked.presence_penalty,
        frequency=asked.frequency_penalty,
        repetition=asked.repetition_penalty,
        bias=dict(asked.logit_bias),
        min_tokens=asked.min_tokens,
        grammar=source if asked.grammar else None,
    )
