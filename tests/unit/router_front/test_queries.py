"""Dashboards and alerts ask for metrics and labels that exist, and every alert has its runbook."""

import json
import re
from typing import get_args

import pytest

from cluster.core.handoff_ends import JOB_ENDS, Cause
from deploy.grafana.make import FOLDER, dashboards, rendered
from tests.metrics_page import listed_metrics
from tests.queries import ROOT, all_queries, rules, selectors

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()


@pytest.mark.parametrize(("where", "query"), all_queries())
def test_what_a_query_names_exists(where: str, query: str) -> None:
    known = {name: (kind, set(labels)) for name, kind, labels in listed_metrics()}
    asked = selectors(query)
    assert asked, where
    for selector in asked:
        name = re.sub("_(bucket|total|count|sum)$", "", selector.name)
        kind, labels = known[name]
        assert (kind == "counter") == selector.name.endswith("_total"), selector
        assert (kind == "histogram") == (name != selector.name and kind != "counter"), selector
        assert selector.uses <= labels | ({"le"} if kind == "histogram" else set()), selector


@pytest.mark.parametrize(("where", "query"), all_queries())
def test_of_what_every_router_tells_the_maximum_is_taken_first(where: str, query: str) -> None:
    """Otherwise two routers would make it twice as much."""
    told = re.findall(
        r"(\w+ by \([^)]*\)|\w+) ?\((?:rate|increase)?\(?headrace_(worker|pair|workers|desired)_?\w*", query
    )
    assert all(outer.startswith(("max", "min")) for outer, _ in told), where


def test_the_words_of_matchers_are_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text() + (ROOT / "docs/faults.md").read_text()
    asked = [value for _, query in all_queries() for s in selectors(query) for op, value in s.labels.values()]
    words = {word for value in asked for word in value.split("|") if "*" not in word}
    assert {word for word in words if word not in page} == set()


def test_a_hand_off_fails_when_its_prefill_worker_is_left_before_it_is_done() -> None:
    """Not when the request ended, nor when the job was refused."""
    (query,) = (rule["expr"] for rule in rules() if rule["alert"] == "HeadraceHandOffsFail")
    ((op, others),) = (s.labels["outcome"] for s in selectors(query) if "outcome" in s.labels)
    assert op == "!~"
    assert set(JOB_ENDS) - set(others.split("|")) == set(get_args(Cause))


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == alerts
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_dashboards_are_as_their_panels_say() -> None:
    for dashboard in dashboards():
        text = (FOLDER / dashboard["file"]).read_text()
        assert text == rendered(dashboard), "run python -m deploy.grafana.make"
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
    assert {path.name for path in FOLDER.glob("*.json")} == {dashboard["file"] for dashboard in dashboards()}


def test_the_chart_has_the_same_rules() -> None:
    chart = ROOT / "deploy/helm/headrace/files/alerts.yaml"
    assert chart.read_text() == (ROOT / "deploy/prometheus/alerts.yaml").read_text()
