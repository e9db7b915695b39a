"""Messages through the model's own chat template, in a sandbox.

The template is rendered here, once, and only here (FAULTS C27). `strftime_now` is not offered: a date in the prompt
would change it every day and spoil every cached prefix; templates that ask for it check whether it is defined.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import orjson
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.core.errors import InvalidRequest, ModelError

TRACER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role as clients write it -> as templates know it. OpenAI's `developer` is its newer name for `system`."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message. `role`: system, user or assistant."""

    role: str
    content: str


class _Refusal(TemplateError):
    """The template itself said no, with `raise_exception`."""


class ChatTemplate:
    """A compiled template. Raises ModelError when it does not compile. Thread-safe."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        # As transformers configures it, or templates would render other white space.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    def render(self, turns: Sequence[ChatTurn], param: str = "messages") -> str:
        """The prompt, ready for the assistant's answer. Raises InvalidRequest naming `param` when it refuses them."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except _Refusal as refusal:
            message = f"the model's chat template refuses these messages: {refusal}"
            raise InvalidRequest(message, param=param) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # What the error says may quote the prompt (FAULTS O08): only its kind is told.
            message = f"the model's chat template cannot render these messages ({type(error).__name__})"
            raise InvalidRequest(message, param=param) from None


def tracer_template() -> ChatTemplate:
    """What the tracer model, which has no folder, uses."""
    return ChatTemplate(TRACER_TEMPLATE, {})


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """A Hugging Face folder's template: chat_template.jinja, else the one in tokenizer_config.json; None without."""
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = orjson.loads(config_file.read_bytes()) if config_file.is_file() else {}
    special = {name: text for name in config if name.endswith("_token") and (text := _token_text(config[name]))}
    if template_file.is_file():
        return ChatTemplate(template_file.read_text(encoding="utf-8"), special)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates; ours is the default one
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    """transformers' `tojson`: no HTML escaping, no ASCII escaping."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)
