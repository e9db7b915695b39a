"""Tools as a client offers them, and calls of them (OpenAI's `tools`, `tool_choice` and `tool_calls`)."""

from dataclasses import dataclass, field
from typing import Literal

ToolFormat = Literal["hermes", "llama3_json"]
"""How a model writes calls: `<tool_call>{...}</tool_call>` among text, or an answer that is nothing but JSON."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters`: a JSON schema; {}: it takes none that are known."""

    name: str
    description: str | None = None
    parameters: dict[str, object] = field(default_factory=dict)

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may or must call. `named`: the one it must call; `parallel`: several calls are welcome."""

    tools: tuple[Tool, ...]
    must: bool = False
    named: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a conversation's history. `arguments`: JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a step adds to call `index` of an answer. `name` comes with the call's first part and never again."""

    index: int
    name: str | None = None
    arguments: str = ""
