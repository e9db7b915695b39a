"""Hostile chat templates end, in little memory; honest ones render as they always did."""

import tracemalloc

import pytest

from cluster.core.errors import InvalidRequest, ModelError
from router.front import template_sandbox
from router.front.chat import ChatTemplate
from router.front.messages import ChatPrompt, ChatTurn
from router.front.template_sandbox import MAX_CHARACTERS

MANY = "{% for i in range(90000) %}"
DOUBLED = "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = X %}{% endfor %}"
BOMBS = {
    "turns": f"{MANY}{MANY}{MANY}{{% set x = 1 %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "turns over messages": "{% for a in messages * 2000 %}{% for b in messages * 2000 %}{% endfor %}{% endfor %}",
    "output": f"{MANY}{{{{ messages[0].content * 1000 }}}}{{% endfor %}}",
    "product": "{{ 'x' * 10000000000 }}",
    "product of a list": "{% set x = messages * 1000000000 %}",
    "list times": "{% set x = [0] * 100000000 %}",
    "power": "{{ 10 ** 10000000 }}",
    "tower": "{{ 9 ** (9 ** 9) }}",
    "doubling": DOUBLED.replace("X", "ns.x + ns.x"),
    "doubling a list": DOUBLED.replace("X", "[ns.x] + [ns.x]").replace("'xx'", "[1]").replace("[ns.x]", "ns.x"),
    "tilde": DOUBLED.replace("X", "ns.x ~ ns.x"),
    "join": DOUBLED.replace("X", "[ns.x, ns.x]|join"),
    "replace": DOUBLED.replace("X", "ns.x|replace('x', 'xx')"),
    "many large ones": f"{{% set x = 'x' * 9000000 %}}{MANY}{{% set y = x|upper %}}{{% endfor %}}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "just": "{{ 'x'.ljust(1000000000) }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "indent": "{{ 'x\ny'|indent(1000000000) }}",
    "tojson": "{{ messages|tojson(indent=1000000000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "round": "{{ 2.5|round(1000000000, 'ceil') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in range(900) recursive %}{{ loop(range(900)) }}{% endfor %}",
    "lipsum": "{{ lipsum(1000000) }}",
    "range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "map": "{% for i in range(90000) %}{% set x = range(90000)|map('string')|list %}{% endfor %}",
}
LONG = "{% set l = [0] * 1900000 %}"
NESTED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = X %}{% set ns.b = Y %}{% endfor %}"
)
LISTS = NESTED.replace("X", "[ns.a, ns.a]").replace("Y", "[ns.b, ns.b]")
DICTS = NESTED.replace("X", "{'x': ns.a, 'y': ns.a}").replace("Y", "{'x': ns.b, 'y': ns.b}")
WALKS = {
    "map and select": LONG + "{% set x = l|map(attribute='y')|select|first %}",
    "reject": LONG + "{% set x = l|reject|list %}",
    "sum": LONG + "{% set x = l|sum %}",
    "compare": LONG + "{% set k = l[:] %}{{ l < k }}",
    "in": LONG + "{{ 1 in l }}",
    "is in": LONG + "{{ 1 is in l }}",
    "cut": LONG + "{% set x = l[1:] %}" * 6,
    "count": LONG + "{% set x = l.count(1) %}",
    "long texts": "{% set a = 'x' * 4000000 %}{% set b = 'x' * 4000000 %}" + "{{ a == b }}" * 2,
    "equal lists": LISTS + "{{ ns.a == ns.b }}",
    "equal dicts": DICTS + "{{ ns.a == ns.b }}",
    "nested lists as a text": LISTS + "{{ ns.a|string }}",
    "nested dicts as JSON": DICTS + "{{ ns.a|tojson }}",
    "nested in what is written": LISTS + "{{ ns.a }}",
    "nested beside a text": LISTS + "{% set x = 'x' ~ ns.a %}",
    "nested in a format": LISTS + "{{ '%s' % ns.a }}",
    "nested in another format": LISTS + "{{ '{}'.format(ns.a) }}",
    "nested in a list that is joined": LISTS + "{{ [ns.a]|join }}",
    "nested and sorted": LISTS + "{{ [ns.a, ns.b]|sort }}",
    "nested and sought": LISTS + "{{ [ns.a].index(ns.b) }}",
    "nested and tested": LISTS + "{{ ns.a is eq ns.b }}",
}
"""What goes through much in what seems one step."""
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range.__call__.__self__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
]


def prompt(*texts: str) -> ChatPrompt:
    return ChatPrompt(tuple(ChatTurn("user", text) for text in texts))


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_too_much_ends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    template = ChatTemplate(BOMBS[name], {})
    with pytest.raises(InvalidRequest) as refused:
        template.render(prompt("hello"))
    assert refused.value.param == "messages"


@pytest.mark.parametrize("name", WALKS)
def test_what_is_gone_through_is_paid_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    with pytest.raises(template_sandbox.Exhausted, match="20000 steps"):
        steps(WALKS[name])


def test_a_filter_takes_a_step_for_each_item() -> None:
    """However many filters are between the items and who takes them; and only for those that are taken."""
    for source, least, most in (
        ("{% set x = l|map('abs')|list %}", 300, 420),
        ("{% set x = l|map('abs')|select|list %}", 300, 630),
        ("{% set x = l|map('abs')|first %}", 100, 120),
        ("{% set x = l|first %}", 0, 10),
    ):
        assert least <= steps("{% set l = [7] * 100 %}" + source) <= most, source


def steps(source: str) -> int:
    """How many a template takes."""
    meters: list[template_sandbox._Meter] = []

    class Kept(template_sandbox._Meter):
        def __init__(self) -> None:
            super().__init__()
            meters.append(self)

    template = template_sandbox.LimitedEnvironment().from_string(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_sandbox, "_Meter", Kept)
        template_sandbox.render(template, {})
    return template_sandbox.MAX_STEPS - meters[0].left


@pytest.mark.parametrize("name", ["doubling", "doubling a list", "tilde", "join", "replace", "product", "format"])
def test_and_takes_little_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    template = ChatTemplate(BOMBS[name], {})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            template.render(prompt("hello"))
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_CHARACTERS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_leave_its_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(prompt("hello"))
    except (InvalidRequest, ModelError):
        return
    assert "class" not in text
    assert "0x" not in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for m in messages if m.content == 'b' %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}", "user: b"),
        ("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}", "ba"),
        ("{% for m in missing %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in messages[0].items() %}{{ k + '=' + v }};{% endfor %}", "role=user;content=a;"),
        ("{{ messages|map(attribute='content')|join(', ') }}", "a, b"),
        ("{{ '%s and %05d' % ('x', 7) }} {{ 'x' * 3 }} {{ 2 ** 10 }} {{ 7 % 3 }}", "x and 00007 xxx 1024 1"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]'),
        ("{{ 12345678|tojson }}{{ [10000000]|first }}", "1234567810000000"),
        ("{{ '{}-{}'.format(1, 'y') }}{{ 'a b'.split(' ')|length }}{{ 'x'|center(3) }}", "1-y2 x "),
        ("{% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[0]) }}{% break_ %}"[:-12], "<a>"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
    ],
)
def test_what_templates_do_is_done_as_before(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(prompt("a", "b")) == text


def test_a_long_conversation_is_no_bomb() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}"
        "{{ '<|im_end|>' ~ '\n' }}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render(prompt(*["a question of some length " * 20] * 5000))
    assert text.count("<|im_end|>") == 5000


def test_what_a_client_writes_is_no_format() -> None:
    text = ChatTemplate("{{ messages[0].content | trim }}{{ '%s' % messages[0].content }}", {}).render(
        prompt("{1234567890} %1234567890d *")
    )
    assert text == "{1234567890} %1234567890d *" * 2
