"""What openai_shapes.py and its neighbours write, as types: for the document alone, nothing is checked against it here.

`tests/integration/test_openapi.py` holds real answers against them.
"""

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_EXACT = ConfigDict(extra="forbid")


@with_config(_EXACT)
class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@with_config(_EXACT)
class ErrorAnswer(TypedDict):
    """Every answer that is no success."""

    error: Error


@with_config(_EXACT)
class PromptDetails(TypedDict):
    cached_tokens: int


@with_config(_EXACT)
class UsageAnswer(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


Finish = Literal["stop", "length", "tool_calls"]


@with_config(_EXACT)
class Alternative(TypedDict):
    token: str
    bytes: list[int] | None
    logprob: float


@with_config(_EXACT)
class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


@with_config(_EXACT)
class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


@with_config(_EXACT)
class CalledFunction(TypedDict):
    name: str
    arguments: str


@with_config(_EXACT)
class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@with_config(_EXACT)
class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


@with_config(_EXACT)
class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish


@with_config(_EXACT)
class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each token of the prompt, by token id; null for the first, which nothing comes before."""


@with_config(_EXACT)
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: NotRequired[PromptLogprobs]


@with_config(_EXACT)
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@with_config(_EXACT)
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_logprobs: NotRequired[PromptLogprobs]


@with_config(_EXACT)
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


@with_config(_EXACT)
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]


@with_config(_EXACT)
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@with_config(_EXACT)
class Tokenized(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: NotRequired[list[str]]


@with_config(_EXACT)
class Detokenized(TypedDict):
    prompt: str


@with_config(_EXACT)
class Live(TypedDict):
    live: bool


@with_config(_EXACT)
class Ready(TypedDict):
    ready: bool
    reasons: NotRequired[list[str]]
