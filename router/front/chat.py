"""Messages through the model's own chat template, in a sandbox with limits (template_sandbox.py).

The template is rendered here, once, and only here (FAULTS C27). `strftime_now` is not offered: a date in the prompt
would change it every day and spoil every cached prefix; templates that ask for it check whether it is defined.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import orjson
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from cluster.core.errors import InvalidRequest, ModelError
from router.front.messages import ChatPrompt, ChatTurn
from router.front.template_sandbox import Exhausted, LimitedEnvironment, render
from router.front.tools.formats import format_of
from router.front.tools.plain import as_text
from router.front.tools.types import ToolCall, ToolFormat

TRACER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
_GO_ON_HERE = "<the answer goes on here>"


class _Refusal(TemplateError):
    """The template itself said no, with `raise_exception`."""


class ChatTemplate:
    """A compiled template. Raises ModelError when it does not compile. Thread-safe.

    `tool_format`: how the model writes calls; None: in a way that is not read here.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], tool_format: ToolFormat | None = None) -> None:
        """`tool_format` overrides what the template itself shows."""
        environment = LimitedEnvironment()
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self.tool_format = tool_format or format_of(source, knows_tools=self._knows_tools)

    def render(self, prompt: ChatPrompt, param: str = "messages") -> str:
        """The prompt as text. Raises InvalidRequest, naming `param`, when the template refuses the messages."""
        turns = list(prompt.turns) if self._knows_tools else as_text(prompt.turns, prompt.tools)
        if prompt.continue_final:
            turns[-1] = replace(turns[-1], content=turns[-1].content + _GO_ON_HERE)
        tools = [tool.for_template() for tool in prompt.tools] if prompt.tools and self._knows_tools else None
        fixed = {
            "messages": [_message(turn) for turn in turns],
            "tools": tools,
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final,
        }
        try:
            text = render(self._template, {**prompt.variables, **self._special_tokens, **fixed})
        except _Refusal as refusal:
            message = f"the model's chat template refuses these messages: {refusal}"
            raise InvalidRequest(message, param=param) from None
        except Exhausted as exhausted:
            message = f"the model's chat template does not end with these messages within its limits: {exhausted}"
            raise InvalidRequest(message, param=param) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # What the error says may quote the prompt (FAULTS O08): only its kind is told.
            message = f"the model's chat template cannot render these messages ({type(error).__name__})"
            raise InvalidRequest(message, param=param) from None
        if not prompt.continue_final:
            return text
        if (end := text.rfind(_GO_ON_HERE)) < 0:
            raise InvalidRequest("the model's chat template does not show the last message", param=param)
        return text[:end]


def _message(turn: ChatTurn) -> dict[str, object]:
    """A message as templates expect it. They ask whether a key is there, so what is not given is left out."""
    message: dict[str, object] = {"role": turn.role, "content": turn.content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in turn.tool_calls
        ]
    return message


def _arguments(call: ToolCall) -> object:
    """Templates write arguments with `tojson`, so they get the object; text that is none stays what it is."""
    try:
        return orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.arguments


def tracer_template() -> ChatTemplate:
    """What the tracer model, which has no folder, uses."""
    return ChatTemplate(TRACER_TEMPLATE, {})


def load_chat_template(folder: Path, tool_format: ToolFormat | None = None) -> ChatTemplate | None:
    """A Hugging Face folder's template: chat_template.jinja, else the one in tokenizer_config.json; None without.

    `tool_format`: how the model writes calls, where its template does not show it.
    """
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = orjson.loads(config_file.read_bytes()) if config_file.is_file() else {}
    special = {name: text for name in config if name.endswith("_token") and (text := _token_text(config[name]))}
    if template_file.is_file():
        return ChatTemplate(template_file.read_text(encoding="utf-8"), special, tool_format)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates; ours is the default one
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, special, tool_format) if isinstance(source, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' `tojson`: no HTML escaping, no ASCII escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)
