"""Writes the Grafana dashboards beside this file from panels.yaml: `python -m deploy.grafana.make`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, ACROSS = 8, 8, 3
Json = dict[str, Any]


def dashboards() -> list[Json]:
    """As panels.yaml has them."""
    read: list[Json] = yaml.safe_load((FOLDER / "panels.yaml").read_text())
    return read


def queries() -> Iterable[tuple[str, str]]:
    """(where, PromQL) of all panels."""
    for dashboard in dashboards():
        for row in dashboard["rows"]:
            for panel in row["panels"]:
                yield from ((f"{dashboard['title']}: {panel['title']}", query) for query in panel["queries"].values())


def to_json(dashboard: Json) -> Json:
    """As Grafana imports it (schema 39, Grafana 10 and later)."""
    panels: list[Json] = []
    top = 0
    for row in dashboard["rows"]:
        place = _place(0, top, 24, 1)
        panels.append({"type": "row", "title": row["row"], "gridPos": place, "panels": [], "collapsed": False})
        top += 1
        for at, panel in enumerate(row["panels"]):
            place = _place(at % ACROSS * WIDTH, top + at // ACROSS * HEIGHT, WIDTH, HEIGHT)
            panels.append(_graph(panel, place))
        top += -(-len(row["panels"]) // ACROSS) * HEIGHT
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "title": dashboard["title"],
        "uid": f"headrace-{dashboard['file'].removesuffix('.json')}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(pick_worker=dashboard.get("pick_worker", False))},
        "panels": panels,
    }


def _place(x: int, y: int, w: int, h: int) -> Json:
    return {"x": x, "y": y, "w": w, "h": h}


def _graph(panel: Json, place: Json) -> Json:
    stacked = panel.get("stacked", False)
    custom: Json = {"fillOpacity": 20 if stacked else 0, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel.get("text", ""),
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel["queries"].items())
        ],
    }


def _variables(*, pick_worker: bool) -> list[Json]:
    source: Json = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    if not pick_worker:
        return [source]
    return [source, _choice("pool", "label_values(headrace_worker_state, pool)"),
            _choice("worker", 'label_values(headrace_worker_state{pool=~"$pool"}, worker)')]  # fmt: skip


def _choice(name: str, query: str) -> Json:
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def rendered(dashboard: Json) -> str:
    return json.dumps(to_json(dashboard), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for dashboard in dashboards():
        (FOLDER / dashboard["file"]).write_text(rendered(dashboard))


if __name__ == "__main__":
    main()
