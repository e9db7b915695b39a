"""Chat templates from model folders, sandboxed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest, ModelError
from router.front.chat import ChatTemplate, load_chat_template
from router.front.messages import ChatPrompt, ChatTurn
from router.front.model_text import ModelText, load_model_text
from router.front.tokenizer import TracerTokenizer
from router.front.tools.types import Tool, ToolCall

TURNS = ChatPrompt((ChatTurn("system", "be brief"), ChatTurn("user", "hi")))
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
    assert ChatTemplate(source, {}).render(ChatPrompt((ChatTurn("user", "<é>"),))) == '"<é>"\n'


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
        ChatTemplate(source, {}).render(ChatPrompt((ChatTurn("user", "canary"),)))
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


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (SIMPLE, "hermes"),  # it knows no tools, so it is helped out in that format
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}Environment: ipython", "llama3_json"),
        ("{{ tools }}<tool_call><function=f>", None),
        ("{{ tools }}[TOOL_CALLS]", None),
    ],
)
def test_the_template_shows_how_calls_are_written(source: str, kind: str | None) -> None:
    assert ChatTemplate(source, {}).tool_format == kind
    assert ChatTemplate(source, {}, "llama3_json").tool_format == "llama3_json"


def test_a_format_that_is_not_read_is_refused_unless_there_are_no_tools() -> None:
    text = ModelText(TracerTokenizer(), ChatTemplate("{{ tools }}[TOOL_CALLS]", {}))
    assert text.chat_ids(TURNS, 100, "messages")
    with pytest.raises(InvalidRequest) as caught:
        text.chat_ids(replace(TURNS, tools=(Tool("f"),)), 100, "messages")
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


CALLED = ChatPrompt(
    (
        ChatTurn("user", "time?"),
        ChatTurn("assistant", "", (ToolCall("1", "clock", '{"zone": "é"}'), ToolCall("2", "clock", "{"))),
        ChatTurn("tool", "noon", tool_call_id="1", name="clock"),
    ),
    (Tool("clock", "tells", {"type": "object"}),),
)


def test_a_template_sees_tools_and_calls_as_it_expects_them() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ '\\n' }}{{ m | tojson }}{% endfor %}"
    tools, *messages = [json.loads(line) for line in ChatTemplate(source, {}).render(CALLED).splitlines()]
    function = {"name": "clock", "description": "tells", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    assert messages[0] == {"role": "user", "content": "time?"}
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [{"zone": "é"}, "{"]
    assert messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "1", "name": "clock"}
    assert ChatTemplate("{{ tools is none }}", {}).render(TURNS) == "True"


def test_a_template_without_tools_is_told_in_words() -> None:
    said = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {}).render(CALLED)
    assert "[system]You can call these functions." in said
    assert '{"type": "function", "function": {"name": "clock", "description": "tells"' in said
    assert '[assistant]<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>\n<tool_call>' in said
    assert said.endswith("[user]<tool_response>\nnoon\n</tool_response>")
    both = ChatTemplate(SIMPLE, {}).render(replace(TURNS, tools=CALLED.tools))
    assert both.startswith("[system]be brief\n\nYou can call")
    assert both.count("[system]") == 1


def test_an_answer_may_go_on_with_the_last_message() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{{ '<a>' if add_generation_prompt }}"
    begun = ChatPrompt((ChatTurn("user", "once"), ChatTurn("assistant", "once upon ")), continue_final=True)
    assert ChatTemplate(source, {}).render(begun) == "<user>once</><assistant>once upon "
    assert ChatTemplate(source, {}).render(replace(begun, continue_final=False)).endswith("upon </><a>")
    assert ChatTemplate(source, {}).render(replace(TURNS, add_generation_prompt=False)).endswith("hi</>")
    with pytest.raises(InvalidRequest, match="does not show"):
        ChatTemplate("{{ messages[0].content }}", {}).render(begun)


def test_further_variables_reach_the_template_and_change_nothing_else() -> None:
    prompt = replace(TURNS, variables={"thinking": False, "bos_token": "no"})
    assert ChatTemplate("{{ bos_token }}{{ thinking }}", {"bos_token": "<s>"}).render(prompt) == "<s>False"
