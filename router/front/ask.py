"""What a client asked, in our terms, before it is known to be possible. HTTP and gRPC bodies both become an `Ask`."""

from dataclasses import dataclass

from router.front.chat import ChatTurn


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # what the tokenizer itself puts around a text (BOS)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    turns: tuple[ChatTurn, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the client spelt what has several names, for error messages."""

    prompt: str
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"


@dataclass(frozen=True, slots=True)
class Ask:
    """None is "not given". Values have their types and nothing more; bounds.py checks the rest."""

    model: str
    prompt: Prompt
    spelling: Spelling
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
