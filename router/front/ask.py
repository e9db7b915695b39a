"""What a client asked, in our terms, before it is known to be possible. HTTP and gRPC bodies both become an `Ask`."""

from dataclasses import dataclass
from typing import NamedTuple

from router.front.messages import ChatPrompt
from router.front.tools.types import ToolUse
from router.requests import Grammar


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # what the tokenizer itself puts around a text (BOS)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the client spelt what has several names, for error messages."""

    prompt: str
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"
    grammar: str = "response_format"
    scored: str = "prompt_logprobs"


class Ask(NamedTuple):
    """None is "not given". Values have their types and nothing more; bounds.py checks the rest.

    `show_stop`: the stop string that ends an answer is part of it; `show_special`: so are special tokens, by
    name; `echo`: the prompt goes before the answer, with its own log-probabilities where `logprobs` are asked for.
    `prompt_logprobs`: those of the prompt are wanted by themselves, beside so many likely tokens.
    """

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
    priority: int | None = None
    show_stop: bool = False
    show_special: bool = False
    echo: bool = False
    tools: ToolUse | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    @property
    def scored(self) -> int | None:
        """How many likely tokens are wanted beside each token of the prompt; None: nothing is, of none."""
        asked = [top for top in (self.prompt_logprobs, self.logprobs if self.echo else None) if top is not None]
        return max(asked, default=None)

    @property
    def fresh(self) -> bool:
        """Whether the answer is a message of its own rather than the prompt's continuation."""
        return isinstance(self.prompt, ChatPrompt) and not self.prompt.continue_final
