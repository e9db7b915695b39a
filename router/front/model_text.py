"""What the front door loads of a model: its tokenizer and its chat template. No weights, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import InvalidRequest, ModelError
from router.front.chat import ChatTemplate, ChatTurn, load_chat_template, tracer_template
from router.front.tokenizer import HuggingFaceTokenizer, Tokenizer, TracerTokenizer

# Tokenising 4 MB takes seconds. A text this much longer than the context is first judged by its start: when that alone
# has twice too many tokens, how the cut changed the last few does not matter.
_GLANCE_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class ModelText:
    """`chat` None: a base model, which has no chat API."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None

    def text_ids(self, text: str, most: int, param: str, *, add_special: bool = True) -> list[int]:
        """Prompt ids of plain text, with what the tokenizer itself adds (BOS) where `add_special`.

        Raises InvalidRequest, naming `param`, for a text that is far longer than `most` tokens.
        """
        return self._encode(text, add_special, most, param)

    def chat_ids(self, turns: Sequence[ChatTurn], most: int, param: str) -> list[int]:
        """Prompt ids of messages; the template writes BOS, so the tokenizer adds nothing. Raises as `text_ids`."""
        if self.chat is None:
            raise InvalidRequest("this model has no chat template; use completions", param=param)
        return self._encode(self.chat.render(turns, param), False, most, param)

    def _encode(self, text: str, add_special: bool, most: int, param: str) -> list[int]:
        start = _GLANCE_CHARACTERS_PER_TOKEN * most
        if len(text) > start and len(self.tokenizer.encode(text[:start], add_special=False)) > 2 * most:
            raise InvalidRequest(f"the prompt has more than {most} tokens", param=param, code="context_length_exceeded")
        return self.tokenizer.encode(text, add_special=add_special)


def load_model_text(folder: Path | None) -> ModelText:
    """From a Hugging Face folder; None is the tracer model. Raises ModelError."""
    if folder is None:
        return ModelText(TracerTokenizer(), tracer_template())
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    return ModelText(HuggingFaceTokenizer(path), load_chat_template(folder))
