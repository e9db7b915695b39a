"""Telling of tools to a model whose chat template knows none, in words that many models were trained on.

Tools go into the system message; calls and results, which such templates would drop or refuse, become text of
assistant and user, in the format of Hermes 2 Pro (https://github.com/NousResearch/Hermes-Function-Calling).
"""

import json
from collections.abc import Iterable, Sequence

from router.front.messages import ChatTurn
from router.front.tools.types import Tool, ToolCall

_INTRODUCTION = "You can call these functions. Each line is the JSON schema of one:"
_HOW = (
    "To call a function, answer with a JSON object of its name and arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"its": "arguments"}}\n</tool_call>'
)


def as_text(turns: Sequence[ChatTurn], tools: Sequence[Tool]) -> list[ChatTurn]:
    """The same conversation in roles and words that any template knows."""
    plain = [_plain(turn) for turn in turns]
    if not tools:
        return plain
    told = _told(tools)
    if plain and plain[0].role == "system":
        return [ChatTurn("system", f"{plain[0].content}\n\n{told}"), *plain[1:]]
    return [ChatTurn("system", told), *plain]


def _told(tools: Iterable[Tool]) -> str:
    lines = [json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools]
    return "\n".join([_INTRODUCTION, "<tools>", *lines, "</tools>", _HOW])


def _plain(turn: ChatTurn) -> ChatTurn:
    if turn.role == "tool":
        return ChatTurn("user", f"<tool_response>\n{turn.content}\n</tool_response>")
    if turn.tool_calls:
        calls = [_call(call) for call in turn.tool_calls]
        return ChatTurn("assistant", "\n".join([turn.content, *calls] if turn.content else calls))
    return turn


def _call(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
