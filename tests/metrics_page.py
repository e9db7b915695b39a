"""docs/metrics.md as data: every metric that it lists."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/metrics.md"
_ROW = re.compile(r"^\| `(headrace_[a-z0-9_]+)` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)


def listed_metrics() -> list[tuple[str, str, tuple[str, ...]]]:
    """(name without `_total`, kind, labels) in the order of the page."""
    rows = _ROW.findall(PAGE.read_text())
    return [(name.removesuffix("_total"), kind, tuple(re.findall("`([a-z]+)`", labels))) for name, kind, labels in rows]
