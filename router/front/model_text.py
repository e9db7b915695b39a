"""What the front door loads of a model: its tokenizer and its chat template. No weights, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import InvalidRequest, ModelError
from router.front.chat import ChatTemplate, ChatTurn, load_chat_template, tracer_template
from router.front.tokenizer import HuggingFaceTokenizer, Tokenizer, TracerTokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """`chat` None: a base model, which has no chat API."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None

    def chat_ids(self, turns: Sequence[ChatTurn]) -> list[int]:
        """Prompt ids of messages; the template writes BOS, so the tokenizer adds nothing. Raises InvalidRequest."""
        if self.chat is None:
            raise InvalidRequest("this model has no chat template; use completions", param="messages")
        return self.tokenizer.encode(self.chat.render(turns), add_special=False)


def load_model_text(folder: Path | None) -> ModelText:
    """From a Hugging Face folder; None is the tracer model. Raises ModelError."""
    if folder is None:
        return ModelText(TracerTokenizer(), tracer_template())
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    return ModelText(HuggingFaceTokenizer(path), load_chat_template(folder))
