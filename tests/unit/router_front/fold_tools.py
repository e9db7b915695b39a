"""Running the text fold over any grouping of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.front.stops import StopStrings
from router.front.text import Delta, FinishReason, SampleText, TextRules, TokenEntry
from router.front.tokenizer import Tokenizer, TracerTokenizer
from router.front.tools.folds import CallFold
from router.front.tools.types import CallDelta
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
    calls: list[tuple[str, str]]


def rules(
    *,
    stops: Sequence[str] = (),
    end_ids: Sequence[int] = (EOS,),
    max_tokens: int = 10_000,
    tokenizer: Tokenizer | None = None,
    fresh: bool = True,
    show_stop: bool = False,
    special: bool = False,
    calls: Callable[[], CallFold] | None = None,
    min_tokens: int = 0,
) -> TextRules:
    watched = StopStrings(stops, shown=show_stop)
    tokenizer, ends = tokenizer or TracerTokenizer(), frozenset(end_ids)
    return TextRules(tokenizer, ends, max_tokens, watched, fresh, special, calls, min_tokens)


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
        calls=joined_calls([call for delta in deltas for call in delta.calls]),
    )


def pieces(text: str, places: Sequence[int]) -> list[str]:
    """`text` cut at `places` (taken modulo the length); pieces may be empty."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def joined_calls(deltas: Sequence[CallDelta]) -> list[tuple[str, str]]:
    """(name, arguments) per call. A call's first delta, and no other, has its name."""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        assert (delta.name is None) == (delta.index in calls)
        name, arguments = calls.get(delta.index, (delta.name or "", ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return list(calls.values())
