"""What the front door has of a model: its tokenizer, its chat template, its grammars. No weights, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.errors import InvalidRequest, ModelError
from router.front.chat import ChatTemplate, load_chat_template, tracer_template
from router.front.grammar_judge import GrammarJudge, judge_of
from router.front.messages import ChatPrompt
from router.front.tokenizer import HuggingFaceTokenizer, Tokenizer, TracerTokenizer
from router.front.tools.types import ToolFormat

# Tokenising 4 MB takes seconds. A text this much longer than the context is first judged by its start: when that alone
# has twice too many tokens, how the cut changed the last few does not matter.
_GLANCE_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class ModelText:
    """`chat` None: a base model, which has no chat API."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    grammars: GrammarJudge = field(default_factory=lambda: judge_of(None))

    def text_ids(self, text: str, most: int, param: str, *, add_special: bool = True) -> list[int]:
        """Prompt ids of plain text, with what the tokenizer itself adds (BOS) where `add_special`.

        Raises InvalidRequest, naming `param`, for a text that is far longer than `most` tokens.
        """
        return self._encode(text, add_special, most, param)

    def chat_ids(self, prompt: ChatPrompt, most: int, param: str) -> list[int]:
        """Prompt ids of messages; the template writes BOS, so the tokenizer adds nothing. Raises as `text_ids`."""
        if self.chat is None:
            raise InvalidRequest("this model has no chat template; use completions", param=param)
        if prompt.tools and self.chat.tool_format is None:
            message = "how this model writes tool calls is not known; router.tool_format may say it"
            raise InvalidRequest(message, param="tools", code="unsupported_parameter")
        return self._encode(self.chat.render(prompt, param), False, most, param)

    def text_of(self, ids: Sequence[int], *, special: bool) -> str:
        """The text that ids stand for; special tokens are left out, or written by name."""
        parts = (self.tokenizer.token_bytes(token) for token in ids)
        if special:
            parts = (self.tokenizer.label(i).encode() if p is None else p for i, p in zip(ids, parts, strict=True))
        text = b"".join(part or b"" for part in parts).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.tokenizer.leading_spaces) :]

    def _encode(self, text: str, add_special: bool, most: int, param: str) -> list[int]:
        start = _GLANCE_CHARACTERS_PER_TOKEN * most
        if len(text) > start and len(self.tokenizer.encode(text[:start], add_special=False)) > 2 * most:
            raise InvalidRequest(f"the prompt has more than {most} tokens", param=param, code="context_length_exceeded")
        return self.tokenizer.encode(text, add_special=add_special)


def load_model_text(folder: Path | None, tool_format: ToolFormat | None = None) -> ModelText:
    """From a Hugging Face folder; None is the tracer model. Raises ModelError.

    `tool_format`: how the model writes tool calls, where its chat template does not show it.
    """
    if folder is None:
        return ModelText(TracerTokenizer(), tracer_template())
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    return ModelText(HuggingFaceTokenizer(path), load_chat_template(folder, tool_format), judge_of(folder))
