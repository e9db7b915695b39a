"""A conversation as the router knows it: what clients send, before any template has seen it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.front.tools.types import Tool, ToolCall

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"
}  # fmt: skip
"""Role as clients write it -> as templates know it. OpenAI's `developer` is its newer name for `system`."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message. `role`: system, user, assistant (which has `tool_calls`) or tool (which has `tool_call_id`)."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, and how they become a prompt.

    `tools`: those the model is told of. `add_generation_prompt`: an assistant's answer is begun. `continue_final`: the
    last message is not ended, the answer goes on with it. `variables`: further ones of the template
    (`chat_template_kwargs`).
    """

    turns: tuple[ChatTurn, ...]
    tools: tuple[Tool, ...] = ()
    add_generation_prompt: bool = True
    continue_final: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def said(self) -> int:
        """Characters of what the messages say: their content, and the arguments of calls."""
        called = sum(len(call.arguments) for turn in self.turns for call in turn.tool_calls)
        return called + sum(len(turn.content) for turn in self.turns)

    @property
    def characters(self) -> int:
        """About as many as the template will write."""
        roles = sum(len(turn.role) for turn in self.turns)
        return self.said + roles + sum(len(str(tool.parameters)) + len(tool.description or "") for tool in self.tools)
