"""Answers in OpenAI's shapes: https://platform.openai.com/docs/api-reference/chat and .../completions.

One class per endpoint with the same methods, so the code that runs a request does not know which one it serves. Both
streams are: [role chunk, chat only] text chunks, one finish chunk per sample, then one usage chunk if asked for.
"""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from cluster.core.ids import new_request_id
from router.front import sse
from router.front.prompt_scores import PromptPart, ShownPrompt, finite, likely
from router.front.text import Delta, FinishReason, TokenEntry
from router.front.tokenizer import Tokenizer
from router.front.tools.types import CallDelta
from router.front.usage import Usage

Json = dict[str, object]


class AnswerHead(NamedTuple):
    """What every message of one answer repeats. `top`: alternatives per token; None: no log-probabilities."""

    answer_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    top: int | None
    include_usage: bool = False


@dataclass(slots=True)
class WholeSample:
    """A sample's deltas gathered for an answer in one piece."""

    texts: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.calls.extend(delta.calls)
        self.entries.extend(delta.entries)
        self.finish = delta.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)


_CUT = "here"  # where an event is cut: the last string of its own that it has


class _Shape(abc.ABC):
    """What both endpoints share."""

    object_whole: str
    object_chunk: str

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chunk_frame = self._frame(self.object_chunk)
        self._around: dict[int, tuple[bytes, bytes]] = {}  # what is before and after a choice's text in its events

    def events(self, delta: Delta) -> bytes:
        """The server-sent events of one delta; nothing when it shows nothing.

        Of a choice that goes on all is the same but its text, as nearly always: that alone is written anew.
        """
        around = self._around.get(delta.index)
        if around is not None and delta.text and delta.finish is None and not delta.calls:
            return b"%b%b%b" % (around[0], orjson.dumps(delta.text), around[1])
        events = b"".join(map(sse.event, self.chunks(delta)))
        if around is None and delta.finish is None and self._head.top is None:
            before, _, after = sse.event(self._text_chunk(delta.index, _CUT)).rpartition(orjson.dumps(_CUT))
            self._around[delta.index] = before, after
        return events

    @abc.abstractmethod
    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of one delta; none when it shows nothing."""

    @abc.abstractmethod
    def _text_chunk(self, index: int, text: str) -> Json:
        """A choice that goes on: text, and nothing else."""

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._chunk_frame, "choices": [], "usage": usage_json(usage)}

    def _frame(self, kind: str) -> Json:
        head = self._head
        return {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._chunk_frame, "choices": [choice]}
        if self._head.include_usage:  # OpenAI: null in every chunk but the last
            chunk["usage"] = None
        return chunk


class ChatShape(_Shape):
    """chat.completion and chat.completion.chunk."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(self, head: AnswerHead, prompt: ShownPrompt) -> None:
        super().__init__(head)
        self._prompt = prompt
        self._opened: set[int] = set()

    def prompt(self, part: PromptPart) -> None:
        """The next tokens of the prompt."""
        self._prompt.add(part)

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of one delta; none when it shows nothing."""
        chunks: list[Json] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            chunks.append(self._choice(delta.index, {"role": "assistant", "content": ""}, (), None))
        parts: list[Json] = [_content(delta.text)] if delta.text else []
        if delta.calls:
            parts.append({"tool_calls": [_call_chunk(call) for call in delta.calls]})
        entries = delta.entries
        for part in parts:
            chunks.append(self._choice(delta.index, part, entries, None))
            entries = ()
        if delta.finish:
            chunks.append(self._choice(delta.index, {}, entries, delta.finish))
        return chunks

    def _text_chunk(self, index: int, text: str) -> Json:
        return self._choice(index, _content(text), (), None)

    def whole(self, samples: Sequence[WholeSample], usage: Usage) -> Json:
        choices = [
            {
                "index": index,
                "message": _message(sample),
                "logprobs": None if self._head.top is None else self._logprobs(sample.entries),
                "finish_reason": sample.finish,
            }
            for index, sample in enumerate(samples)
        ]
        whole = {**self._frame(self.object_whole), "choices": choices, "usage": usage_json(usage)}
        listed = self._prompt.listed
        return whole if listed is None else {**whole, "prompt_logprobs": listed.json()}

    def _choice(self, index: int, delta: Json, entries: Sequence[TokenEntry], finish: FinishReason | None) -> Json:
        shown = self._head.top is not None and any(entry.shown for entry in entries)
        logprobs = self._logprobs(entries) if shown else None
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def _logprobs(self, entries: Iterable[TokenEntry]) -> Json:
        return {"content": [self._entry(entry) for entry in entries if entry.shown], "refusal": None}

    def _entry(self, entry: TokenEntry) -> Json:
        top = [
            self._token(token_id, self._head.tokenizer.token_bytes(token_id), logprob)
            for token_id, logprob in entry.logprob.top[: self._head.top]
        ]
        return {**self._token(entry.token_id, entry.bytes, entry.logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, token: bytes | None, logprob: float) -> Json:
        return {
            "token": self._head.tokenizer.label(token_id),
            "bytes": None if token is None else list(token),
            "logprob": finite(logprob),
        }


class CompletionShape(_Shape):
    """text_completion, whole and in chunks. `prompts`: per choice, what is told of its prompt before the answer."""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, head: AnswerHead, prompts: Sequence[ShownPrompt]) -> None:
        super().__init__(head)
        self._prompts = prompts
        self._unopened = {at for at, prompt in enumerate(prompts) if prompt.text or prompt.echoed is not None}

    def prompt(self, part: PromptPart) -> None:
        """The next tokens of a prompt."""
        self._prompts[part.index].add(part)

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of one delta; none when it shows nothing."""
        text, opens = delta.text, delta.index in self._unopened
        if opens:
            self._unopened.remove(delta.index)
            text = self._prompts[delta.index].text + text
        if not text and not delta.finish and not opens:
            return []
        return [self._chunk(self._choice(delta.index, text, delta.entries, delta.finish, opens=opens))]

    def _text_chunk(self, index: int, text: str) -> Json:
        return self._chunk(self._choice(index, text, (), None, opens=False))

    def whole(self, samples: Sequence[WholeSample], usage: Usage) -> Json:
        choices = []
        for index, sample in enumerate(samples):
            prompt = self._prompts[index]
            choice = self._choice(index, prompt.text + sample.text, sample.entries, sample.finish, opens=True)
            if prompt.listed is not None:
                choice["prompt_logprobs"] = prompt.listed.json()
            choices.append(choice)
        return {**self._frame(self.object_whole), "choices": choices, "usage": usage_json(usage)}

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenEntry], finish: FinishReason | None, *, opens: bool
    ) -> Json:
        prompt = self._prompts[index]
        logprobs: Json | None = None
        if self._head.top is not None:
            answer = self._logprobs(entries, len(prompt.text))
            logprobs = {**answer} if prompt.echoed is None or not opens else prompt.echoed.json(answer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[TokenEntry], before: int) -> dict[str, list[object]]:
        """`before`: characters of the choice's text before the answer."""
        shown = [entry for entry in entries if entry.shown]
        label = self._head.tokenizer.label
        return {
            "tokens": [label(entry.token_id) for entry in shown],
            "token_logprobs": [finite(entry.logprob.logprob) for entry in shown],
            "top_logprobs": [self._top(entry) for entry in shown],
            "text_offset": [before + entry.offset for entry in shown],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        """The most likely tokens and, always, the drawn one."""
        logprob = entry.logprob
        return likely(self._head.tokenizer, entry.token_id, logprob.logprob, logprob.top[: self._head.top])


def _content(text: str) -> Json:
    return {"content": text}


def _message(sample: WholeSample) -> Json:
    message: Json = {"role": "assistant", "content": sample.text, "refusal": None}
    if sample.calls:
        message["content"] = sample.text or None
        message["tool_calls"] = _whole_calls(sample.calls)
    return message


def _whole_calls(deltas: Iterable[CallDelta]) -> list[Json]:
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.name is not None:
            names[delta.index] = delta.name
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments[index])}}
        for index, name in names.items()
    ]


def _call_chunk(delta: CallDelta) -> Json:
    """The first part of a call has its id and name, the others only more of its arguments."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": _call_id(), "type": "function", "function": function}


def _call_id() -> str:
    return f"call_{new_request_id()[:24]}"


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def model_json(model: str, created: int, max_context: int | None) -> Json:
    """`max_model_len` is vLLM's name for the context, which its clients read; left out while it is not known."""
    shape: Json = {"id": model, "object": "model", "created": created, "owned_by": "headrace"}
    return shape if max_context is None else {**shape, "max_model_len": max_context}
