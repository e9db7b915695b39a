"""Writes what `config:` of the chart may hold into values.schema.json: `python -m deploy.helm.schema`.

From the typed settings themselves, so that Helm refuses a key or a value that a pod would refuse when it starts.
"""

import json
from pathlib import Path
from typing import Any

from cluster.core.config import ClusterConfig

FILE = Path(__file__).parent / "headrace/values.schema.json"
Json = dict[str, Any]


def with_settings(chart: Json) -> Json:
    """The chart's schema with the settings' in it, under names of their own: `#/$defs/config.EngineSettings`."""
    settings = _small(ClusterConfig.model_json_schema(ref_template="#/$defs/config.{model}"))
    own = {name: each for name, each in chart["$defs"].items() if not name.startswith("config.")}
    theirs = {f"config.{name}": each for name, each in settings.pop("$defs").items()}
    return {**chart, "properties": {**chart["properties"], "config": settings}, "$defs": {**own, **theirs}}


def _small(schema: Any, *, names: bool = False) -> Any:
    """Without what says nothing about right and wrong. `names`: the keys are settings, not JSON Schema's words."""
    if isinstance(schema, list):
        return [_small(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    small = {
        key: _small(value, names=not names and key in ("properties", "$defs"))
        for key, value in schema.items()
        if names or key not in ("title", "description", "default")
    }
    return {**small, "additionalProperties": False} if not names and "patternProperties" in schema else small


def text_of(schema: Json) -> str:
    """As it is in the file."""
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text_of(with_settings(json.loads(FILE.read_text()))))
