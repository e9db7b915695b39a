"""OpenAI request bodies: bytes to typed, strict bodies, and those to an `Ask`.

Three kinds of fields beside the supported ones: ours or other servers' internals are refused by name, so nobody can
speak to the inside from outside; fields of the API that are not built yet are refused unless they ask for nothing;
unknown ones are ignored, as OpenAI does. No message here quotes a value of the body (FAULTS O08).
"""

from dataclasses import replace
from typing import Annotated, Self

from pydantic import BeforeValidator, FailFast, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.core.errors import InvalidRequest
from router.front.ask import Ask, Prompt, Spelling, TextPrompt, TokenPrompt
from router.front.chat_bodies import MAX_TOOLS, Body, ChatMessage, ToolBody, ToolChoice, chat_prompt, tool_use
from router.front.json_body import json_object
from router.front.rules_body import RulesBody
from router.front.tools.schema import demanded
from router.front.tools.types import ToolUse
from router.front.unsupported import refuse_unsupported
from router.requests import Grammar

MAX_PROMPTS = 256
"""Of objects and lists within each other. What reads a schema or a template's variables later goes into them by calls
of itself, and a call too many would be our error, not the client's."""


def _one_or_many(value: object) -> object:
    """`stop`: a string or a list of strings."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return tuple(texts)


def null_is_empty(value: object) -> object:
    """For lists that some clients write as null when they have none."""
    return [] if value is None else value


_STOP = {"default": None}
_PROMPT: dict[str, object] = {}  # the types of both are written with their limits, in openapi/limits.py


class StreamOptions(Body):
    include_usage: bool | None = None


class InferenceBody(RulesBody):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_many), WithJsonSchema(_STOP)] = ()
    stop_token_ids: Annotated[list[int], FailFast(), BeforeValidator(null_is_empty)] = Field(default_factory=list)
    ignore_eos: bool | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def asks(self) -> list[Ask]:
        """This body in our own terms, one per prompt. Raises InvalidRequest for fields that contradict each other."""
        raise NotImplementedError

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises InvalidRequest naming the field."""
        fields = json_object(raw, cls.model_fields.keys())
        refuse_unsupported(fields)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise named(error) from None
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("prompt_logprobs is not told in a stream", param="prompt_logprobs")
        return body

    def _common(
        self,
        prompt: Prompt,
        spelling: Spelling,
        max_tokens: int | None,
        logprobs: int | None,
        *,
        echo: bool = False,
        tools: ToolUse | None = None,
    ) -> Ask:
        grammar, grammar_field = self.grammar()
        return Ask(
            model=self.model,
            prompt=prompt,
            spelling=spelling if grammar is None else replace(spelling, grammar=grammar_field),
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
            priority=self.priority,
            show_stop=bool(self.include_stop_str_in_output),
            show_special=self.skip_special_tokens is False,
            echo=echo,
            tools=tools,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            grammar=grammar,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatBody(InferenceBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ToolBody] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def asks(self) -> list[Ask]:
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
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        prompt = chat_prompt(self, () if use is None else use.tools)
        ask = self._common(prompt, spelling, older if newer is None else newer, logprobs, tools=use)
        if use is None or (schema := demanded(use)) is None:
            return [ask]
        if ask.grammar is not None:
            message = f"tool_choice demands a call, and {ask.spelling.grammar} says what the answer must look like"
            raise InvalidRequest(message, param=ask.spelling.grammar)
        return [ask._replace(grammar=Grammar("json_schema", schema), spelling=replace(ask.spelling, grammar="tools"))]


class CompletionBody(InferenceBody):
    """POST /v1/completions. `best_of` may only repeat `n`."""

    prompt: Annotated[object, WithJsonSchema(_PROMPT)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def asks(self) -> list[Ask]:
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            code = "unsupported_parameter" if self.best_of > n else "invalid_value"
            raise InvalidRequest("best_of other than n is not supported", param="best_of", code=code)
        prompts = _completion_prompts(self.prompt)
        names = ["prompt"] if len(prompts) == 1 else [f"prompt[{at}]" for at in range(len(prompts))]
        scored = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
        return [
            self._common(
                prompt, Spelling(prompt=name, scored=scored), self.max_tokens, self.logprobs, echo=bool(self.echo)
            )
            for prompt, name in zip(prompts, names, strict=True)
        ]


def _completion_prompts(value: object) -> list[TextPrompt | TokenPrompt]:
    """A text, a list of token ids, or a list of several of either. Raises InvalidRequest."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return [_completion_prompt(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are taken at once", param="prompt")
    kind = type(value[0])
    if not all(type(item) is kind for item in value):
        raise InvalidRequest("prompt must be all strings or all lists of token ids", param="prompt")
    return [_completion_prompt(item, "prompt") for item in value]


def _completion_prompt(value: object, param: str) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be a string, a list of token ids, or a list of these", param=param)
    if not all(type(item) is int for item in value):
        raise InvalidRequest("prompt: token ids must be integers", param=param)
    return TokenPrompt(tuple(value))


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
