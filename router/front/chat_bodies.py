"""Messages and tools of a chat body, each to our own terms (messages.py). No error here quotes a value (FAULTS O08)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.core.errors import InvalidRequest
from router.front.messages import ROLES, ChatPrompt, ChatTurn
from router.front.tools.types import Tool, ToolCall, ToolUse

MAX_TOOLS = 128
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class Body(BaseModel):
    """Base of all bodies: strict types (true is no number), unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


def _content(value: object) -> object:
    """Message content: a string, or a list of text parts, which are joined by line ends."""
    if value is None or isinstance(value, str):
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
    if value == "function":
        raise PydanticCustomError("unsupported", "functions are not supported; use tools")
    if not isinstance(value, str) or value not in ROLES:
        raise PydanticCustomError("role", f"must be one of {', '.join(ROLES)}")
    return ROLES[value]


def _nothing(value: object) -> object:
    """A part of messages that is not supported."""
    if value is not None and value != []:
        raise PydanticCustomError("unsupported", "is not supported")
    return None


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}, {"type": "null"}]}
_NONE = {"enum": [None, []], "deprecated": True}
_Nothing = Annotated[object, BeforeValidator(_nothing), WithJsonSchema(_NONE)]


class CallFunction(Body):
    name: str
    arguments: str


class MessageCall(Body):
    """A call that an assistant made earlier."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CallFunction


class ChatMessage(Body):
    role: Annotated[str, BeforeValidator(_role), WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT)] = None
    tool_calls: Annotated[list[MessageCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: _Nothing = None
    audio: _Nothing = None

    def turn(self, param: str) -> ChatTurn:
        """Raises InvalidRequest naming the field, `param` being the message's own name."""
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{param}.content must not be null", param=f"{param}.content")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("only an assistant calls tools", param=f"{param}.tool_calls")
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return ChatTurn(self.role, self.content or "", tuple(calls), self.tool_call_id, self.name)


class Conversation(Protocol):
    """The fields of a body that make a chat prompt."""

    @property
    def messages(self) -> list[ChatMessage]: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, object] | None: ...


def chat_prompt(body: Conversation, tools: tuple[Tool, ...]) -> ChatPrompt:
    """Raises InvalidRequest naming the field."""
    turns = tuple(message.turn(f"messages[{at}]") for at, message in enumerate(body.messages))
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other"
        raise InvalidRequest(message, param="continue_final_message")
    variables = body.chat_template_kwargs or {}
    if taken := _OWN_VARIABLES & variables.keys():
        raise InvalidRequest(f"chat_template_kwargs must not hold {min(taken)}", param="chat_template_kwargs")
    return ChatPrompt(
        turns,
        tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
        variables=variables,
    )


def _tool_name(value: object) -> object:
    if not isinstance(value, str) or not _TOOL_NAME.fullmatch(value):
        raise PydanticCustomError("name", "must be 1 to 128 letters, digits, underscores, dots or dashes")
    return value


_NAME = {"type": "string", "pattern": f"^{_TOOL_NAME.pattern}$"}


class ToolFunction(Body):
    name: Annotated[str, BeforeValidator(_tool_name), WithJsonSchema(_NAME)]
    description: str | None = None
    parameters: dict[str, object] | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: ToolFunction

    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.description, self.function.parameters or {})


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one function that must be called."""

    name: str


def _choice(value: object) -> object:
    if value is None or value in ("none", "auto", "required"):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(name)
        case {"type": "allowed_tools" | "custom"}:
            raise PydanticCustomError("unsupported", "only a named function is supported")
    raise PydanticCustomError("choice", "must be none, auto, required or an object that names a function")


_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None, PlainValidator(_choice), WithJsonSchema(_CHOICE)
]


def tool_use(tools: Sequence[ToolBody] | None, choice: ToolChoice, parallel: bool | None) -> ToolUse | None:
    """What may be called; None: nothing. Raises InvalidRequest for a choice that there is not."""
    offered = tuple(tool.tool() for tool in tools or ())
    if not offered:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice demands a call, and there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    named = choice.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in {tool.name for tool in offered}:
        raise InvalidRequest("tool_choice names a function that is not among tools", param="tool_choice")
    return ToolUse(offered, must=choice == "required" or named is not None, named=named, parallel=parallel is not False)
