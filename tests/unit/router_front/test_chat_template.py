"""Chat templates from model folders, sandboxed."""

import json
from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest, ModelError
from router.front.chat import ChatTemplate, ChatTurn, load_chat_template
from router.front.model_text import load_model_text

TURNS = (ChatTurn("system", "be brief"), ChatTurn("user", "hi"))
SIMPLE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def write(folder: Path, config: dict[str, object], template: str | None = None) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_template_and_special_tokens_come_from_the_config(tmp_path: Path, bos: object) -> None:
    template = load_chat_template(write(tmp_path, {"chat_template": SIMPLE, "bos_token": bos}))
    assert template is not None
    assert template.render(TURNS) == "<s>[system]be brief[user]hi"


def test_a_jinja_file_goes_first(tmp_path: Path) -> None:
    template = load_chat_template(
        write(tmp_path, {"chat_template": "old"}, "{{ messages|length }} {{ add_generation_prompt }}")
    )
    assert template is not None
    assert template.render(TURNS) == "2 True"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    template = load_chat_template(write(tmp_path, {"chat_template": named}))
    assert template is not None
    assert template.render(TURNS) == "d"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert load_chat_template(write(tmp_path, {})) is None


def test_white_space_and_tojson_are_as_in_transformers() -> None:
    source = "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content|tojson }}\n  {% endif %}\n{% endfor %}"
    assert ChatTemplate(source, {}).render([ChatTurn("user", "<é>")]) == '"<é>"\n'


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(TURNS)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ strftime_now('%d') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_what_a_template_cannot_do_is_a_client_error_that_quotes_nothing(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render") as caught:
        ChatTemplate(source, {}).render([ChatTurn("user", "canary")])
    assert "canary" not in caught.value.message


def test_there_is_no_clock_unless_the_template_can_do_without() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}fixed{% endif %}"
    assert ChatTemplate(source, {}).render(TURNS) == "fixed"


def test_a_template_that_does_not_compile_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_the_tracer_model_needs_no_folder() -> None:
    text = load_model_text(None)
    assert bytes(text.chat_ids(TURNS, 100, "messages")) == b"system: be brief\nuser: hi\nassistant: "


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model_text(tmp_path)
