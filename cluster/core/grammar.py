"""Grammars: from a source to what may come next (llguidance, an Earley parser over lexemes whose regexes are derived
lazily; see docs/decisions/0012-grammars.md).

Nothing is compiled ahead: a grammar is parsed in milliseconds, and each step derives what it needs. Both are bounded by
LIMITS, so that a bomb ends in an error and not in a stall. Routers try a source here before they admit it, in a process
that may be killed; engines then build from the same source, under the same limits.
"""

from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from cluster.core.errors import GrammarError

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=20_000,  # of 1 to 2 kB, of each matcher
    max_grammar_size=200_000,
    verbose_errors=False,  # an error may end in a log, and must not quote what was written
)
# A model that falls into white space gets out of it again; as much as indented JSON needs.
_WHITE_SPACE = r"[ \t\r\n]{0,40}"


class GrammarMatcher:
    """Where one sample stands in its grammar: an engine.rules.Matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def copy(self) -> "GrammarMatcher":
        """One that goes on from here by itself."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that were written. Raises GrammarError when the grammar does not allow them."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError("what was written does not fit the grammar, or took it beyond its limits")

    def allowed(self) -> NDArray[np.bool_]:
        """[V]: what may come next; the end-of-sequence tokens where the grammar may end.

        Raises GrammarError when nothing may, or when finding out takes more than a step may.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")
        allowed_V = np.zeros(self._vocab_size, np.bool_)
        bits = np.unpackbits(words, bitorder="little", count=min(8 * len(words), self._vocab_size))
        allowed_V[: len(bits)] = bits
        allowed_V[self._eos_ids] = self._matcher.is_accepting()
        if not allowed_V.any():
            raise GrammarError("the grammar allows nothing here")
        return allowed_V


class Vocabulary:
    """What a model can write, as bytes. `compile` may be called from any thread."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted(eos_ids), np.int64)

    def compile(self, kind: str, source: str) -> GrammarMatcher:
        """The start of a grammar. Raises GrammarError saying what is wrong with it, without quoting it at length."""
        matcher = LLMatcher(self._tokenizer, _grammar(kind, source), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        return GrammarMatcher(matcher, self._vocab_size, self._eos_ids)


def folder_vocabulary(folder: Path, vocab_size: int | None = None, eos_ids: Sequence[int] | None = None) -> Vocabulary:
    """That of a Hugging Face folder's tokenizer.json; half a second, and 40 MB, for 49,000 tokens.

    `vocab_size`: the width of the logits, where they are wider than the tokenizer, or narrower. Raises GrammarError.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError("the model has no tokenizer.json")
    try:
        tokenizer = LLTokenizer(str(path), eos_token=list(eos_ids) if eos_ids else None)
    except ValueError as error:
        raise GrammarError(f"the tokenizer is not supported: {_first_line(str(error))}") from None
    ends = tokenizer.eos_tokens if eos_ids is None else eos_ids
    return Vocabulary(tokenizer, vocab_size or tokenizer.vocab_size, ends)


class _Tracer:
    """The weightless tracer model's tokens: ids 0..255 are bytes, every other is written `<id>`, the last one ends."""

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = vocab_size - 1
        self.bos_token_id = None
        self.tokens = [bytes((i,)) if i < 256 else b"<%d>" % i for i in range(vocab_size)]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tracer_vocabulary(vocab_size: int) -> Vocabulary:
    """That of the tracer model."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Tracer(vocab_size)), eos_token=vocab_size - 1)
    return Vocabulary(tokenizer, vocab_size, [vocab_size - 1])


def _grammar(kind: str, source: str) -> str:
    try:
        match kind:
            case "json_object":
                return _json('{"type":"object"}')
            case "json_schema":
                return _json(source)
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "lark":
                return LLMatcher.grammar_from_lark(source)
    except ValueError as error:
        raise GrammarError(_first_line(str(error))) from None
    raise GrammarError(f"{kind} is no kind of grammar")


def _json(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})


def _first_line(text: str) -> str:
    """What went wrong, bounded: the rest is a picture of the source."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 200 else line[:197] + "..."
