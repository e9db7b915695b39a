"""One sample's text: a pure fold over token ids (DESIGN §4.11).

    feed(ids, ...) -> Delta, any number of times, until a Delta has `finish`

1. Each id is counted, up to and including the one that ends the sample.
2. It ends at the first id where any of these holds: end-of-sequence or stop token (its own text is not shown), a stop
   string completed (text is cut before it), max_tokens reached; or where the decode worker says so. What comes later
   is dropped and counted. A stop string completed by one of the first min_tokens ids is text like any other.
3. Its bytes become characters (utf8.py), characters pass the stop strings (stops.py), what is certain is shown; where
   tools may be called, as content or as calls (tools/folds.py).
How ids were grouped into calls changes the grouping of deltas and nothing else, so a stream, a whole answer and a
replay agree by construction.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from router.front.stops import StopScan, StopStrings
from router.front.tokenizer import Tokenizer
from router.front.tools.folds import CallFold, Parsed
from router.front.tools.types import CallDelta
from router.front.utf8 import Utf8Stream
from router.requests import EndReason, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


class TextRules(NamedTuple):
    """What ends a sample and how its tokens read; shared by the samples of a request.

    `end_ids`: ids that end it and are not shown. `fresh`: the text starts a message of its own, so the space that some
    tokenizers put before a text is dropped; otherwise it continues the prompt and the space belongs to it.
    `special`: special tokens are shown by name.
    `calls`: makes the fold that finds tool calls; None: all is content.
    """

    tokenizer: Tokenizer
    end_ids: frozenset[int]
    max_tokens: int
    stops: StopStrings
    fresh: bool
    special: bool = False
    calls: Callable[[], CallFold] | None = None
    min_tokens: int = 0

    @property
    def plain(self) -> bool:
        """Nothing is held back: neither a stop string nor a call may begin in the text."""
        return self.calls is None and self.stops.empty

    def bytes_of(self, token_id: int) -> bytes | None:
        """What a token adds to the text, special ones by name."""
        token = self.tokenizer.token_bytes(token_id)
        return self.tokenizer.label(token_id).encode() if token is None else token


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token's log-probability and place. `bytes` None: it has no text. `offset`: characters of the sample before it.

    `shown` False: none of its text is in the answer (it ended the sample, or a stop string cut it off).
    """

    token_id: int
    bytes: bytes | None
    offset: int
    logprob: TokenLogprob
    shown: bool = True


@dataclass(slots=True)  # not frozen, which is most of the cost of making one, and there is one for every token
class Delta:
    """What one step adds to a sample. `ids` are those counted by it; `entries` come with the text they belong to.

    `text`: content; `calls`: of tools.
    """

    index: int
    text: str = ""
    ids: tuple[int, ...] = ()
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    calls: tuple[CallDelta, ...] = ()


@dataclass(slots=True)
class _Step:
    """What one `feed` has gathered so far."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, CallDelta] = field(default_factory=dict)
    counted: int = 0
    finish: FinishReason | None = None

    def add(self, parsed: Parsed) -> None:
        self.text.append(parsed.content)
        for call in parsed.calls:
            known = self.calls.get(call.index)
            arguments = call.arguments if known is None else known.arguments + call.arguments
            self.calls[call.index] = CallDelta(call.index, call.name if known is None else known.name, arguments)


class SampleText:
    """The fold of sample `index`."""

    def __init__(self, index: int, rules: TextRules) -> None:
        self._index = index
        self._rules = rules
        self._utf8 = Utf8Stream(rules.tokenizer.leading_spaces if rules.fresh else 0)
        self._scan = StopScan(rules.stops)
        self._calls = None if rules.calls is None else rules.calls()
        self._plain = rules.plain
        self._bytes_of = rules.bytes_of if rules.special else rules.tokenizer.token_bytes
        self._waiting: deque[TokenEntry] = deque()
        self._shown_characters = 0
        self.finish: FinishReason | None = None
        self.completion_tokens = 0
        self.dropped_tokens = 0

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = (), end: EndReason | None = None) -> Delta:
        """Take the next ids. `logprobs` is empty or as long as `ids`; `end`: the worker ended with the last of them."""
        if self.finish is not None:
            self.dropped_tokens += len(ids)
            return Delta(self._index)
        rules = self._rules
        goes_on = end is None and self.completion_tokens + len(ids) < rules.max_tokens
        if goes_on and self._plain and not logprobs and not self._waiting and rules.end_ids.isdisjoint(ids):
            return self._more(tuple(ids))
        step = _Step()
        while step.counted < len(ids) and step.finish is None:
            at = step.counted
            piece = ids[at : self._piece_end(ids, at, alone=bool(logprobs))]
            self._take(piece, logprobs[at] if logprobs else None, step)
        if step.finish is None and end is not None:
            self._end("length" if end == "length" else "stop", step)
        if step.finish is not None and self._calls is not None:
            step.add(self._calls.finish())
            if step.finish == "stop" and self._calls.complete():
                step.finish = "tool_calls"
        self.dropped_tokens += len(ids) - step.counted
        self.finish = step.finish
        text, calls = "".join(step.text), tuple(step.calls.values())
        entries = self._release() if text or calls or step.finish else ()
        return Delta(self._index, text, tuple(ids[: step.counted]), entries, step.finish, calls)

    def _more(self, ids: tuple[int, ...]) -> Delta:
        """Most of all feeds: ids that do not end the sample, where nothing is held back. What `_take` would come to."""
        self.completion_tokens += len(ids)
        text = self._utf8.feed(b"".join(filter(None, map(self._bytes_of, ids))))[1]
        self._shown_characters += len(text)
        return Delta(self._index, text, ids)

    def _piece_end(self, ids: Sequence[int], at: int, *, alone: bool) -> int:
        """Where the ids from `at` on end that can be looked at together: at the first that may end the sample."""
        rules = self._rules
        if alone or not self._plain:
            return at + 1
        end = min(len(ids), at + max(1, rules.max_tokens - self.completion_tokens))
        if rules.end_ids.isdisjoint(ids):
            return end
        return next((i + 1 for i in range(at, end) if ids[i] in rules.end_ids), end)

    def _take(self, piece: Sequence[int], logprob: TokenLogprob | None, step: _Step) -> None:
        """The next ids, of which only the last may end the sample. With a `logprob` it is one."""
        rules, offset, last = self._rules, self._utf8.characters, piece[-1]
        step.counted += len(piece)
        self.completion_tokens += len(piece)
        ends = last in rules.end_ids
        shown = piece[:-1] if ends else piece
        texts = [part for token in shown if (part := self._bytes_of(token)) is not None]
        contributed = None
        if texts:
            contributed, text = self._utf8.feed(b"".join(texts))
            self._show(text, step)
        if logprob is not None:
            own = contributed if texts else rules.tokenizer.token_bytes(last)
            self._waiting.append(TokenEntry(last, own, offset, logprob, shown=not ends))
        if step.finish is not None:
            return
        if ends:
            self._end("stop", step)
        elif self.completion_tokens >= rules.max_tokens:
            self._end("length", step)

    def _show(self, text: str, step: _Step) -> None:
        """Pass characters through the stop strings; a match ends the sample."""
        certain, matched = self._scan.feed(text, armed=self.completion_tokens > self._rules.min_tokens)
        self._tell(certain, step)
        if matched:
            step.finish = "stop"

    def _tell(self, text: str, step: _Step) -> None:
        """Text that no stop string can take back; the end of the last call that is wanted ends the sample."""
        self._shown_characters += len(text)
        if self._calls is None:
            step.text.append(text)
            return
        step.add(self._calls.feed(text))
        if self._calls.over:
            step.finish = "stop"

    def _end(self, reason: FinishReason, step: _Step) -> None:
        """The sample ends without a stop string: an incomplete character and held-back text are shown now."""
        step.finish = reason
        self._show(self._utf8.finish(), step)
        self._tell(self._scan.finish(), step)

    def _release(self) -> tuple[TokenEntry, ...]:
        """Entries whose first character is shown now; at the end the rest, marked when their text is not shown."""
        released: list[TokenEntry] = []
        shown = self._shown_characters
        while self._waiting and (self.finish or self._waiting[0].offset < shown):
            entry = self._waiting.popleft()
            inside = entry.offset < shown or (not entry.bytes and entry.offset == shown)
            released.append(replace(entry, offset=min(entry.offset, shown), shown=entry.shown and inside))
        return tuple(released)
