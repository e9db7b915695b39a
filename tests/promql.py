"""What a query answers of the samples of one moment: as much of PromQL as dashboards and alerts need.

A range of a metric is taken as the number that `rate` or `increase` would make of it. Raises NotImplementedError for
what is not here, so no query is understood by half.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable
from statistics import fmean
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
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum, "count": len, "avg": fmean}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip
_COMPUTE: dict[str, Callable[[float, float], float]] = {
    "/": lambda one, other: _divided(one, other), "*": operator.mul, "+": operator.add, "-": operator.sub,
}  # fmt: skip
_SETS = ("and", "or", "unless")


def answer(query: str, samples: Samples) -> Vector:
    """The series that the query gives; empty: as an alert's condition it does not hold."""
    found = _value(promql_parser.parse(query), list(samples))
    assert isinstance(found, dict)
    return found


def sides(query: str, samples: Samples) -> list[Vector]:
    """What a condition compares, answered one by one; a query that compares nothing is its own only side."""
    kept = list(samples)
    found = [_value(node, kept) for node in _sides(promql_parser.parse(query))]
    return [side if isinstance(side, dict) else {frozenset(): side} for side in found]


def _sides(node: Any) -> list[Any]:
    kind = type(node).__name__
    if kind == "ParenExpr":
        return _sides(node.expr)
    if kind == "Call" and node.func.name == "absent":
        return _sides(node.args[0])
    if kind == "BinaryExpr" and str(node.op) in (*_SETS, *_COMPARE):
        return _sides(node.lhs) + _sides(node.rhs)
    return [node]


def _divided(one: float, other: float) -> float:
    """As Prometheus does: what cannot be divided is no number, or without end."""
    if other:
        return one / other
    return math.copysign(math.inf, one) if one else math.nan


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
    if node.param is not None or (node.modifier is not None and "By" not in str(node.modifier.type)):
        raise NotImplementedError(f"{node.op} with a parameter, or without labels")
    by = set(node.modifier.labels) if node.modifier is not None else set()
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset(each for each in labels if each[0] in by), []).append(value)
    return {labels: float(_AGGREGATE[str(node.op)](values)) for labels, values in groups.items()}


def _call(node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector | float:
    *given, argument = node.args
    vector = _vector(argument, samples)
    match node.func.name:
        case "histogram_quantile":
            share = _value(given[0], samples)
            assert isinstance(share, float)
            return _quantile(share, vector)
        case "scalar":
            return next(iter(vector.values())) if len(vector) == 1 else math.nan
        case "rate" | "increase":
            return vector
        case "absent":
            return {} if vector else {frozenset(): 1.0}
    raise NotImplementedError(node.func.name)


def _quantile(share: float, buckets: Vector) -> Vector:
    """Of each histogram, as Prometheus interpolates it. No number where nothing was observed."""
    by_series: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        by_series.setdefault(frozenset(each for each in labels if each[0] != "le"), []).append((bound, count))
    return {labels: _of_one(share, sorted(found)) for labels, found in by_series.items()}


def _of_one(share: float, buckets: list[tuple[float, float]]) -> float:
    """`buckets`: upper bounds and how many are below each, the last without end."""
    (end, total), rank = buckets[-1], share * buckets[-1][1]
    if end != math.inf or len(buckets) < 2 or not total:
        return math.nan
    at = next(index for index, (_, count) in enumerate(buckets) if count >= rank)
    if buckets[at][0] == math.inf:
        return buckets[-2][0]
    low, below = buckets[at - 1] if at else (0.0, 0.0)
    high, count = buckets[at]
    return low + (high - low) * (rank - below) / (count - below) if count > below else high


def _combine(op: str, node: Any, samples: list[tuple[str, dict[str, str], float]]) -> Vector:
    """Series pair by all their labels, since no query says otherwise (`on`, `ignoring`)."""
    if node.modifier is not None and (node.modifier.matching is not None or node.modifier.return_bool):
        raise NotImplementedError("on, ignoring, bool")
    left, right = _vector(node.lhs, samples), _value(node.rhs, samples)
    if op in _SETS:
        assert isinstance(right, dict)
        if op == "or":
            return {**right, **left}
        return {labels: value for labels, value in left.items() if (labels in right) is (op == "and")}
    others = right if isinstance(right, dict) else dict.fromkeys(left, right)
    pairs = {labels: (value, others[labels]) for labels, value in left.items() if labels in others}
    if op in _COMPARE:
        return {labels: one for labels, (one, other) in pairs.items() if _COMPARE[op](one, other)}
    return {labels: _COMPUTE[op](one, other) for labels, (one, other) in pairs.items()}
