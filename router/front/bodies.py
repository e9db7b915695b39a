"""OpenAI request bodies: bytes to typed, strict bodies, and those to an `Ask`.

Three kinds of fields beside the supported ones: ours or other servers' internals are refused by name, so nobody can
speak to the inside from outside; fields of the API that are not built yet are refused unless they ask for nothing;
unknown ones are ignored, as OpenAI does. No message here quotes a value of the body (FAULTS O08).
"""

from typing import Annotated, Self

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError
from pydantic_core import PydanticCustomError

from cluster.core.errors import InvalidRequest
from router.front.ask import Ask, ChatPrompt, Prompt, Spelling, TextPrompt, TokenPrompt
from router.front.chat import ROLES, ChatTurn
from router.front.unsupported import refuse_unsupported


def _one_or_many(value: object) -> object:
    """`stop`: a string or a list of strings."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return tuple(texts)


def _null_is_empty(value: object) -> object:
    return [] if value is None else value


def _content(value: object) -> object:
    """Message content: a string, or a list of text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("unsupported", "only parts of type text are supported")
        if not isinstance(text := part.get("text"), str):
            raise PydanticCustomError("content", "a text part must hold a string `text`")
        texts.append(text)
    return "\n".join(texts)


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise PydanticCustomError("unsupported", "tools are not supported yet")
    if not isinstance(value, str) or value not in ROLES:
        raise PydanticCustomError("role", f"must be one of {', '.join(ROLES)}")
    return ROLES[value]


def _nothing(value: object) -> object:
    """A part of messages that is not built yet."""
    if value is not None and value != []:
        raise PydanticCustomError("unsupported", "is not supported yet")
    return None


class Body(BaseModel):
    """Base of all bodies: strict types (true is no number), unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatMessage(Body):
    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]
    tool_calls: Annotated[object, BeforeValidator(_nothing)] = None
    function_call: Annotated[object, BeforeValidator(_nothing)] = None
    audio: Annotated[object, BeforeValidator(_nothing)] = None


class InferenceBody(Body):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    stop_token_ids: Annotated[list[int], FailFast(), BeforeValidator(_null_is_empty)] = []
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def ask(self) -> Ask:
        """This body in our own terms. Raises InvalidRequest for fields that contradict each other."""
        raise NotImplementedError

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises InvalidRequest naming the field."""
        fields = json_object(raw)
        refuse_unsupported(fields)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise named(error) from None
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        return body

    def _common(self, prompt: Prompt, spelling: Spelling, max_tokens: int | None, logprobs: int | None) -> Ask:
        return Ask(
            model=self.model,
            prompt=prompt,
            spelling=spelling,
            max_tokens=max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            logprobs=logprobs,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatBody(InferenceBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def ask(self) -> Ask:
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            message = "max_tokens and max_completion_tokens contradict each other"
            raise InvalidRequest(message, param="max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        spelling = Spelling(
            prompt="messages",
            max_tokens="max_tokens" if newer is None else "max_completion_tokens",
            logprobs="top_logprobs",
        )
        prompt = ChatPrompt(tuple(ChatTurn(message.role, message.content) for message in self.messages))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._common(prompt, spelling, older if newer is None else newer, logprobs)


class CompletionBody(InferenceBody):
    """POST /v1/completions. `best_of` may only repeat `n`."""

    prompt: object
    logprobs: int | None = None
    best_of: int | None = None

    def ask(self) -> Ask:
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            code = "unsupported_parameter" if self.best_of > n else "invalid_value"
            raise InvalidRequest("best_of other than n is not supported", param="best_of", code=code)
        prompt = _completion_prompt(self.prompt)
        return self._common(prompt, Spelling(prompt="prompt"), self.max_tokens, self.logprobs)


def _completion_prompt(value: object) -> TextPrompt | TokenPrompt:
    """A text, a list of token ids, or a list of exactly one of these. Raises InvalidRequest."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            message = "several prompts in one request are not supported"
            raise InvalidRequest(message, param="prompt", code="unsupported_parameter")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")
    if not all(type(item) is int for item in value):
        raise InvalidRequest("prompt: token ids must be integers", param="prompt")
    return TokenPrompt(tuple(value))


def json_object(raw: bytes) -> dict[str, object]:
    """A body's fields. Raises InvalidRequest."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        message = f"the body is no valid JSON in UTF-8: {error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidRequest(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def named(error: ValidationError) -> InvalidRequest:
    """The first fault, with its place as the client would write it: `messages[0].role`."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in fault["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    codes = {"missing": "missing_required_parameter", "unsupported": "unsupported_parameter"}
    code = codes.get(fault["type"], "invalid_type")
    # pydantic's own words for this one name our classes.
    problem = "input should be an object" if fault["type"] == "model_type" else fault["msg"].lower()
    return InvalidRequest(f"{param}: {problem}", param=param or None, code=code)
