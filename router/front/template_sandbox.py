"""Jinja's sandbox, with limits: a template ends, and in little memory, whatever it and the messages are.

A chat template is a program that comes with a model's folder. Jinja's own sandbox keeps it from files and from Python;
this one also counts. Every turn of a loop, every call and every filter is a step, and so are every 1,000 characters
that one of them reads or writes: so many characters, so much time. What would make too long a text by itself is refused
before it is made.

1. rewrite  loops iterate over `_counted(...)`, `a ~ b` becomes a filter: in the template's tree, before it is compiled
2. run      with a meter of its own for each rendering; Exhausted ends it
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 300_000
MAX_CHARACTERS = 16_000_000
_A_STEP = 1_000  # characters
_AN_ITEM = 8  # characters: of memory
_WIDEST = 1_000_000
_LARGEST_BITS = 256_000
_WIDE = re.compile(r"\d{7,}|\*")
_TAKE_WIDTHS = {"batch", "center", "format", "indent", "round", "slice", "tojson", "truncate", "wordwrap"}


class Exhausted(TemplateError):
    """The template did too much."""


class _Meter:
    def __init__(self) -> None:
        self.left = MAX_STEPS

    def pay(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise Exhausted(f"more than {MAX_STEPS} steps")

    def pay_for(self, values: Iterable[object]) -> None:
        self.pay(1 + sum(len(value) for value in values if isinstance(value, str | list | tuple)) // _A_STEP)


_meter: ContextVar[_Meter] = ContextVar("meter")


def render(template: Template, variables: dict[str, object]) -> str:
    """The text of a template of a `LimitedEnvironment`. Raises Exhausted, and what else templates raise."""
    token = _meter.set(_Meter())
    try:
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _meter.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """As transformers configures its own, or templates would render other white space."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        del self.globals["lipsum"]
        self.globals["range"] = _range
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters["_counted"], self.filters["_concat"] = _counted, _metered(_concat)

    def add_filter(self, name: str, function: Callable[..., object]) -> None:
        """Like any other filter, it pays."""
        self.filters[name] = _metered(function, widths=name in _TAKE_WIDTHS, formats=name == "format")

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _meter.get().pay_for((left, right, result))
        return result

    def call(self, context: Context, called: object, /, *args: object, **kwargs: object) -> object:
        if isinstance(called, LoopContext) and args:  # a recursive loop goes into what it is given
            args = (_counted(args[0]), *args[1:])
        method = getattr(called, "__wrapped__", called)  # Jinja wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_widths((*args, *kwargs.values()))
            if getattr(method, "__name__", "") in ("format", "format_map"):
                _check_format(text)
        _meter.get().pay_for((text, *args))
        result = super().call(context, called, *args, **kwargs)
        _meter.get().pay_for((result,))
        return result

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        _replace_concats(source)
        source.set_environment(self)
        return super()._generate(source, *rest, **options)


class _Counted:
    """Pays for each item that is taken."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        pay = _meter.get().pay
        for item in self._items:
            pay(1)
            yield item


class _CountedSized(_Counted):
    def __len__(self) -> int:
        return len(self._items)


def _counted(items: object) -> _Counted:
    return _CountedSized(items) if isinstance(items, Sized) else _Counted(items)


def _metered(function: Callable[..., object], *, widths: bool = False, formats: bool = False) -> Callable[..., object]:
    """A filter that pays for what it reads and writes. `wraps` keeps what Jinja marks it with."""

    @functools.wraps(function)
    def metered(*args: object, **kwargs: object) -> object:
        meter = _meter.get(None)
        if meter is None:  # a constant expression, computed when the template is compiled
            meter = _Meter()
        if widths:
            _check_widths((*args[1:], *kwargs.values()))
        if formats:
            _check_format(args[0])
        meter.pay_for(args)
        result = function(*args, **kwargs)
        meter.pay_for((result,))
        return result

    return metered


def _range(*args: int) -> range:
    made = range(*args)
    _meter.get().pay(len(made))
    return made


def _concat(parts: list[object]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _replace_concats(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _as_filter(value))
        elif isinstance(value, list):
            value[:] = [_as_filter(each) if isinstance(each, nodes.Concat) else each for each in value]
    for child in node.iter_child_nodes():
        _replace_concats(child)


def _as_filter(concat: nodes.Concat) -> nodes.Filter:
    parts = nodes.List(concat.nodes, lineno=concat.lineno)
    return nodes.Filter(parts, "_concat", [], [], None, None, lineno=concat.lineno)


def _check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise Exhausted(f"a text of more than {MAX_CHARACTERS} characters")


def _check_widths(values: Iterable[object]) -> None:
    """Widths and counts that a text or a list would be made of."""
    for value in values:
        if isinstance(value, int) and abs(value) > _WIDEST:
            raise Exhausted(f"a number above {_WIDEST}")


def _check_format(text: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise Exhausted("a format that may be too wide")


def _size(value: object) -> int | None:
    """In characters of memory, about; None for what is no sequence."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _AN_ITEM if isinstance(value, list | tuple) else None


def _check_operation(operator: str, left: object, right: object) -> None:
    sizes = (_size(left), _size(right))
    match operator:
        case "+" if sizes[0] is not None and sizes[1] is not None:
            _check_size(sizes[0] + sizes[1])
        case "*" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        case "*" if isinstance(right, int) and sizes[0] is not None:
            _check_size(sizes[0] * right)
        case "*" if isinstance(left, int) and sizes[1] is not None:
            _check_size(left * sizes[1])
        case "**" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        case "%" if isinstance(left, str):
            _check_format(left)


def _check_bits(bits: int) -> None:
    if bits > _LARGEST_BITS:
        raise Exhausted("a number that is too large")
