"""Jinja's sandbox, with limits: a template ends, and in little memory, whatever it and the messages are.

A chat template is a program that comes with a model's folder. Jinja's own sandbox keeps it from files and from Python;
this one also counts. Every turn of a loop, every call and every filter is a step, so is every item that a filter goes
through, and so are every 1,000 characters that one of them reads or writes: so many characters, so much time. What is
compared or made a text of is paid for with all that is in it, since what contains one thing twice, again and again, is
larger than any memory. What would make too long a text by itself is refused before it is made.

1. rewrite  loops iterate over `_counted(...)`, `a ~ b` becomes a filter, what is compared or cut goes through another
            (`_weighed`, `_cut`): in the template's tree, before it is compiled
2. run      with a meter of its own for each rendering; Exhausted ends it
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 300_000
MAX_CHARACTERS = 16_000_000
_A_STEP = 1_000  # characters
_AN_ITEM = 8  # characters: of memory
_AT_ONCE = 100  # items that are compared, or made a text of, in one step
_WIDEST = 1_000_000
_LARGEST_BITS = 256_000
_WIDE = re.compile(r"\d{7,}|\*")
_TAKE_WIDTHS = {"batch", "center", "format", "indent", "round", "slice", "tojson", "truncate", "wordwrap"}
_TAKE_FEW = {"attr", "count", "d", "default", "first", "last", "length", "random"}  # items, of all that they are given
_DO_NOT_LOOK_IN = {"batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}


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

    def pay_for_items(self, values: Iterable[object]) -> None:
        """Of those that are gone through one by one."""
        self.pay(sum(len(value) for value in values if isinstance(value, list | tuple | dict | range)))

    def weigh(self, *values: object) -> None:
        """Pay for all that is in them, as often as it is in them."""
        left = list(values)
        while left:
            match left.pop():
                case str() as text:
                    self.pay(len(text) // _A_STEP)
                case list() | tuple() as items:
                    self.pay(1 + len(items) // _AT_ONCE)
                    left += [each for each in items if isinstance(each, _WEIGHTY)]
                case dict() as items:
                    self.pay(1 + len(items) // _AT_ONCE)
                    left += [each for each in items.values() if isinstance(each, _WEIGHTY)]


_Function = Callable[..., object]
_WEIGHTY = (str, list, tuple, dict)
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
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_weighed
        )
        del self.globals["lipsum"]
        self.globals["range"] = _range
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.tests = {name: _weighing(cast("_Function", each)) for name, each in self.tests.items()}
        self.filters |= {"_counted": _counted, "_concat": _metered(_concat, "_concat")}
        self.filters |= {"_weighed": _weighed, "_cut": _metered(_weighed, "first")}

    def add_filter(self, name: str, function: Callable[..., object]) -> None:
        """Like any other filter, it pays."""
        self.filters[name] = _metered(function, name)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operation(operator, left, right)
        if operator == "%":
            _weighed(right)  # it becomes a text
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
        if isinstance(text, str | list | tuple):  # its items are compared with others, or it takes them into itself
            _meter.get().weigh(text, *args, *kwargs.values())
        _meter.get().pay_for((text, *args))
        result = super().call(context, called, *args, **kwargs)
        _meter.get().pay_for((result,))
        return result

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        _replace(source)
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


def _metered(function: Callable[..., object], name: str) -> Callable[..., object]:
    """A filter that pays for what it reads and writes. `wraps` keeps what Jinja marks it with."""
    widths, formats = name in _TAKE_WIDTHS, name == "format"
    goes_through, looks_in = name not in _TAKE_FEW, name not in _TAKE_FEW | _DO_NOT_LOOK_IN

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
        if goes_through:
            meter.pay_for_items(args)
        if looks_in:
            meter.weigh(*args, *kwargs.values())
        result = function(*args, **kwargs)
        meter.pay_for((result,))
        return (
            _Counted(result) if isinstance(result, Iterator) else result
        )  # which goes through the rest as it is taken

    return metered


def _weighing(function: Callable[..., object]) -> Callable[..., object]:
    """A test that pays for what it may compare."""

    @functools.wraps(function)
    def weighing(*args: object, **kwargs: object) -> object:
        for each in args:
            _weighed(each)
        return function(*args, **kwargs)

    return weighing


def _weighed(value: object) -> object:
    """The same, paid for."""
    if isinstance(value, _WEIGHTY):
        (_meter.get(None) or _Meter()).weigh(value)
    return value


def _range(*args: int) -> range:
    made = range(*args)
    _meter.get().pay(len(made))
    return made


def _concat(parts: list[object]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _replace(node: nodes.Node) -> None:
    """In the whole tree, what costs more than it seems."""
    for child in node.iter_child_nodes():
        _replace(child)
    if isinstance(node, nodes.Compare):
        _weigh_operands(node)
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))
        elif isinstance(value, list):
            value[:] = [_replaced(each) for each in value]


def _replaced(node: Any) -> Any:
    match node:
        case nodes.Concat():
            return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))
        case nodes.Getitem(arg=nodes.Slice(), ctx="load"):
            return _filter("_cut", node)
    return node


def _weigh_operands(node: nodes.Compare) -> None:
    """Where both sides may be large: a comparison with a text of the template's costs no more than that."""
    sides: list[Any] = [node, *node.ops]
    if (
        len(node.ops) == 1
        and node.ops[0].op in ("eq", "ne")
        and any(isinstance(each.expr, nodes.Const) for each in sides)
    ):
        return
    for each in sides:
        if not isinstance(each.expr, nodes.Const):
            each.expr = _filter("_weighed", each.expr)


def _filter(name: str, expression: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


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
