"""Queries of dashboards and alert rules, and what they ask for, by a PromQL parser."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from deploy.grafana.make import dashboards, queries, to_json

ROOT = Path(__file__).parent.parent
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
_OPS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in a query: its matchers, and all labels that the query needs it to have."""

    name: str
    labels: dict[str, tuple[str, str]]
    uses: frozenset[str]


def rules() -> list[dict[str, Any]]:
    """Of alerts.yaml."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def all_queries() -> list[tuple[str, str]]:
    """(where, PromQL) of panels and alerts, with Grafana's variables filled in."""
    alerts = [(rule["alert"], rule["expr"]) for rule in rules()]
    return [(where, _filled(query)) for where, query in (*queries(), *alerts)]


def variables() -> list[tuple[str, str, str]]:
    """(where, PromQL selector, label) of what Grafana asks to fill its drop-down lists."""
    found = []
    for dashboard in dashboards():
        for each in to_json(dashboard)["templating"]["list"]:
            if each["type"] == "query":
                asked = re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"])
                assert asked is not None, each
                found.append((f"{dashboard['title']}: {each['name']}", _filled(asked[1]), asked[2]))
    return found


def _filled(query: str) -> str:
    return re.sub(r"\$(pool|worker)\b", ".*", query.replace("$__rate_interval", "1m"))


def matchers(selector: Any) -> dict[str, tuple[str, str]]:
    """Of a parsed selector: label -> (operator, text)."""
    return {m.name: (_OPS[str(m.op)], m.value) for m in selector.matchers.matchers}


def selectors(query: str) -> list[Selector]:
    """Raises ValueError for a query that is none."""
    return list(_selectors(promql_parser.parse(query), frozenset()))


def _selectors(node: Any, grouped: frozenset[str]) -> Iterator[Selector]:
    match type(node).__name__:
        case "VectorSelector":
            labels = matchers(node)
            yield Selector(node.name, labels, grouped | labels.keys())
        case "MatrixSelector":
            yield from _selectors(node.vector_selector, grouped)
        case "AggregateExpr":
            by = node.modifier.labels if node.modifier is not None else ()
            yield from _selectors(node.expr, grouped | frozenset(by))
        case "BinaryExpr":
            yield from _selectors(node.lhs, grouped)
            yield from _selectors(node.rhs, grouped)
        case "Call":
            for argument in node.args:
                yield from _selectors(argument, grouped)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from _selectors(node.expr, grouped)
