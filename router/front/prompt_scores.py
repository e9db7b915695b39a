"""A prompt's own tokens with their log-probabilities: as they come from the worker, and as clients read them.

They come in parts of bounded size, all before the first delta, and each part is written as it comes: an answer is put
together from bytes that are there already.
    EchoedLogprobs   OpenAI's `logprobs` of completions, for a prompt that is echoed
    PromptLogprobs   vLLM's `prompt_logprobs`: https://docs.vllm.ai, `CompletionResponse` and `ChatCompletionResponse`
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import orjson

from cluster.scores import Scores
from router.front.tokenizer import Tokenizer
from router.front.utf8 import Utf8Stream

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def finite(logprob: float) -> float:
    """What JSON can say of a log-probability."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def likely(tokenizer: Tokenizer, token: int, own: float, top: Iterable[tuple[int, float]]) -> dict[str, float]:
    """What completions tell beside a token: those in `top`, the likeliest first, by their labels, and always itself.

    Several tokens may have one label ("A", and the byte that is an A): it stands for the one that was drawn, else for
    the likeliest.
    """
    told = {tokenizer.label(token): finite(own)}
    others: dict[str, float] = {}
    for token_id, logprob in top:
        others.setdefault(tokenizer.label(token_id), finite(logprob))
    return {**others, **told}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens `ids` from position `start` on. `scores` None: the first of all, which nothing comes before.

    `index`: the first of the choices that answer this prompt.
    """

    index: int
    start: int
    ids: tuple[int, ...]
    scores: Scores | None

    def rows(self, top: int) -> Iterator[tuple[int, float, list[int], list[float], int]]:
        """Of each token: its id, its log-probability, the ids and those of the `top` most likely ones, its rank."""
        if self.scores is None:
            return
        logprobs, ids = self.scores.logprobs.tolist(), self.scores.ids[:, :top].tolist()
        for token, own, likely, rank in zip(self.ids, logprobs, ids, self.scores.ranks.tolist(), strict=True):
            yield token, own[0], likely, own[1 : 1 + top], rank


class _List:
    """A JSON list that is written piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, items: Sequence[object]) -> None:
        if items:
            self._pieces.append(orjson.dumps(items)[1:-1])

    def json(self, more: Sequence[object] = ()) -> orjson.Fragment:
        """The whole list, with `more` behind it."""
        last = [orjson.dumps(more)[1:-1]] if more else []
        return orjson.Fragment(b"[" + b",".join([*self._pieces, *last]) + b"]")


class _Offsets:
    """Where in the prompt's text its tokens begin. A special token counts where its name stands in the text."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._utf8 = Utf8Stream(tokenizer.leading_spaces)
        self._named = 0

    def next(self, token_id: int) -> int:
        """Of the next token. What a tokenizer changes in a text may move it; it is never beyond the end."""
        at = min(self._utf8.characters + self._named, len(self._text))
        token = self._tokenizer.token_bytes(token_id)
        if token is not None:
            self._utf8.feed(token)
        elif self._text.startswith(label := self._tokenizer.label(token_id), at):
            self._named += len(label)
        return at


class EchoedLogprobs:
    """The four lists of completions' `logprobs`, for the prompt `text`; `top` alternatives for each token."""

    def __init__(self, text: str, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._offsets = _Offsets(text, tokenizer)
        self._top = top
        self._lists = {name: _List() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def add(self, part: PromptPart) -> None:
        """The next tokens."""
        rows = list(part.rows(self._top))
        missing = [None] * (len(part.ids) - len(rows))
        self._lists["tokens"].add([self._tokenizer.label(token) for token in part.ids])
        self._lists["token_logprobs"].add([*missing, *(finite(own) for _, own, _, _, _ in rows)])
        tops = [likely(self._tokenizer, token, own, zip(ids, lps, strict=True)) for token, own, ids, lps, _ in rows]
        self._lists["top_logprobs"].add([*missing, *tops])
        self._lists["text_offset"].add([self._offsets.next(token) for token in part.ids])

    def json(self, answer: dict[str, list[object]]) -> dict[str, object]:
        """With those of the answer's tokens behind them."""
        return {name: written.json(answer[name]) for name, written in self._lists.items()}


class PromptLogprobs:
    """A list with, for each token of the prompt, {id: {logprob, rank, decoded_token}}; null for the first."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._list = _List()

    def add(self, part: PromptPart) -> None:
        """The next tokens."""
        rows: list[object] = [self._row(*row) for row in part.rows(self._top)]
        self._list.add([*[None] * (len(part.ids) - len(rows)), *rows])

    def json(self) -> orjson.Fragment:
        return self._list.json()

    def _row(self, token: int, own: float, ids: list[int], logprobs: list[float], rank: int) -> dict[str, object]:
        """The prompt's token first, then the most likely ones."""
        row = {str(token): self._entry(token, own, rank)}
        for at, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            row.setdefault(str(token_id), self._entry(token_id, logprob, at + 1))
        return dict(row)

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, object]:
        token = self._tokenizer.token_bytes(token_id)
        text = self._tokenizer.label(token_id) if token is None else token.decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """What an answer says of its prompt. `text`: echoed before the answer, or "" ."""

    text: str = ""
    echoed: EchoedLogprobs | None = None
    listed: PromptLogprobs | None = None

    def add(self, part: PromptPart) -> None:
        """The next tokens."""
        for written in (self.echoed, self.listed):
            if written is not None:
                written.add(part)
