"""Running the text fold over any grouping of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.front.stops import StopStrings
from router.front.text import Delta, FinishReason, SampleText, TextRules, TokenEntry
from router.front.tokenizer import Tokenizer, TracerTokenizer
from router.requests import EndReason, TokenLogprob

EOS = 1023


@dataclass(frozen=True, slots=True)
class Folded:
    """A sample, joined."""

    text: str
    ids: tuple[int, ...]
    entries: tuple[TokenEntry, ...]
    finish: FinishReason | None
    completion_tokens: int
    seen_tokens: int


def rules(
    *,
    stops: Sequence[str] = (),
    end_ids: Sequence[int] = (EOS,),
    max_tokens: int = 10_000,
    fresh: bool = True,
    tokenizer: Tokenizer | None = None,
) -> TextRules:
    return TextRules(tokenizer or TracerTokenizer(), frozenset(end_ids), max_tokens, StopStrings(stops), fresh)


def groups(ids: Sequence[int], places: Sequence[int]) -> list[tuple[int, ...]]:
    """`ids` cut at `places` (taken modulo the length); groups may be empty."""
    edges = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [tuple(ids[a:b]) for a, b in pairwise(edges)]


def fold(how: TextRules, parts: Sequence[Sequence[int]], end: EndReason | None = "length") -> Folded:
    """Feed the parts; `end` comes with the last of them. Each id's log-probability is -id."""
    sample = SampleText(0, how)
    deltas: list[Delta] = []
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        logprobs = [TokenLogprob(-float(i)) for i in part]
        deltas.append(sample.feed(part, logprobs, end if last else None))
    return Folded(
        text="".join(delta.text for delta in deltas),
        ids=tuple(i for delta in deltas for i in delta.ids),
        entries=tuple(entry for delta in deltas for entry in delta.entries),
        finish=sample.finish,
        completion_tokens=sample.completion_tokens,
        seen_tokens=sample.completion_tokens + sample.dropped_tokens,
    )
