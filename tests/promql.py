"""What a query answers of the samples of one moment: as much of PromQL as conditions of alerts need.

A range of a metric is taken as the number that `rate` or `increase` would make of it. Raises NotImplementedError for
what is not here, so no condition is understood by half.
"""

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import promql_parser

from tests.queries import matchers

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Samples = Iterable[tuple[str, dict[str, str], float]]

_MATCH: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum, "count": len}
_COMPARE = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le}
_COMPUTE = {"/": operator.truediv, "*": operator.mul, "+": operator.add, "-": operator.sub}


def answer(query: str, samples: Samples) -> Vector:
    """The series that the query gives; empty: as an alert's condition it does not hold."""
    found = _value(promql_parser.parse(query), list(samples))
    assert isinstance(found, dict)
    return found


def _value(node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector | float:
    match type(node).__name__:
        case "NumberLiteral":
            return float(node.val)
        case "ParenExpr":
            return _value(node.expr, samples)
        case "VectorSelector":
            return _select(node, samples)
        case "MatrixSelector":
            return _select(node.vector_selector, samples)
        case "AggregateExpr":
            return _aggregate(node, _vector(node.expr, samples))
        case "Call":
            return _call(node, samples)
        case "BinaryExpr":
            return _combine(str(node.op), node, samples)
    raise NotImplementedError(type(node).__name__)


def _vector(node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector:
    found = _value(node, samples)
    assert isinstance(found, dict)
    return found


def _select(node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector:
    wanted = matchers(node)
    return {
        frozenset(labels.items()): value
        for name, labels, value in samples
        if name == node.name and all(_MATCH[op](labels.get(key, ""), text) for key, (op, text) in wanted.items())
    }


def _aggregate(node: Any, vector: Vector) -> Vector:
    by = set(node.modifier.labels) if node.modifier is not None else set()
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset(each for each in labels if each[0] in by), []).append(value)
    return {labels: float(_AGGREGATE[str(node.op)](values)) for labels, values in groups.items()}


def _call(node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector:
    (argument,) = node.args
    vector = _vector(argument, samples)
    match node.func.name:
        case "rate" | "increase":
            return vector
        case "absent":
            return {} if vector else {frozenset(): 1.0}
    raise NotImplementedError(node.func.name)


def _combine(op: str, node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector:
    """Series pair by all their labels, since no condition says otherwise (`on`, `ignoring`)."""
    if node.modifier is not None and node.modifier.matching is not None:
        raise NotImplementedError("on, ignoring")
    left, right = _vector(node.lhs, samples), _value(node.rhs, samples)
    if op in ("unless", "and", "or"):
        assert isinstance(right, dict)
        if op == "or":
            return {**right, **left}
        return {labels: value for labels, value in left.items() if (labels in right) is (op == "and")}
    others = right if isinstance(right, dict) else dict.fromkeys(left, right)
    pairs = {labels: (value, others[labels]) for labels, value in left.items() if labels in others}
    if op in _COMPARE:
        return {labels: one for labels, (one, other) in pairs.items() if _COMPARE[op](one, other)}
    return {labels: _COMPUTE[op](one, other) for labels, (one, other) in pairs.items()}
