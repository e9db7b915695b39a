"""docs/configuration.md, written from the typed settings: every key, its kinds of values, its default, what it does.

`headrace config --reference` prints it, and a test compares it with the page, so neither can run ahead of the other.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from cluster.core.config import ClusterConfig

_HEAD = """\
# Configuration reference

Written by `headrace config --reference` from the typed settings: change those, not this page.

One YAML file (`-f cluster.yaml`, the same on every machine). Every key has a default; an unknown key or an impossible
value is an error that names it. `--set engine.dtype=float32` overrides one key of the file. `headrace config -f
cluster.yaml` checks a file and shows every setting that programs would be started with. They read them once, so a
change needs [a rolling restart](upgrade.md); certificates and tenants are read again while they run.

On Kubernetes these keys go under `config:` in the chart's values ([Kubernetes](kubernetes.md)). Secrets are files or
environment variables ([security](security.md), [tenants](tenants.md)); passwords in a `redis_url` are the exception.
"""

_Schema = dict[str, Any]
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_PLAIN = {"integer": "integer", "number": "number", "string": "text"}


def reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *_group(_schema(ClusterConfig), "")])


def undescribed(model: type[BaseModel] = ClusterConfig) -> list[str]:
    """Names of the keys, and of the groups of keys, about which nothing is said. A test wants none."""
    schema = _schema(model)
    groups = {model.__name__: schema, **schema.get("$defs", {})}
    silent = [name for name, group in groups.items() if not group.get("description")]
    for name, group in groups.items():
        silent += [f"{name}.{key}" for key, one in group["properties"].items() if not _said(one, groups)]
    return silent


def _schema(model: type[BaseModel]) -> _Schema:
    return model.model_json_schema()


def _said(one: _Schema, groups: dict[str, _Schema]) -> str:
    inner = one.get("$ref")
    return str(one.get("description") or (groups[_name(inner)].get("description", "") if inner else ""))


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _group(root: _Schema, path: str, group: _Schema | None = None) -> Iterator[str]:
    """A heading, a table of plain keys, then the groups below it."""
    group, groups = group or root, root.get("$defs", {})
    below: list[tuple[str, _Schema]] = []
    rows = []
    for key, one in group["properties"].items():
        full, inner = path + key, _inner(one)
        if inner is not None:
            ref, suffix = inner
            below.append((full + suffix, groups[ref]))
        if inner is None or inner[1]:
            said = _said(one, groups)
            default = "required" if key in group.get("required", ()) else _default(one["default"])
            rows.append(f"| `{full}` | {_kinds(one)} | {default} | {said} |")
    title = f"`{path.rstrip('.')}`" if path else "Top level"
    yield f"## {title}\n"
    yield " ".join(group["description"].split()) + "\n"
    if rows:
        yield "\n".join(["| key | values | default | |", "| --- | --- | --- | --- |", *rows, ""])
    for full, inner_group in below:
        yield from _group(root, full + ".", inner_group)


def _inner(one: _Schema) -> tuple[str, str] | None:
    """The group of keys that is this key's value, and how one of several is named: `tenants.<name>`, `faults[]`."""
    for held, suffix in ((one, ""), (one.get("additionalProperties"), ".<name>"), (_pattern(one), ".<name>")):
        if isinstance(held, dict) and "$ref" in held:
            return _name(held["$ref"]), suffix
    items = one.get("items")
    return (_name(items["$ref"]), "[]") if isinstance(items, dict) and "$ref" in items else None


def _pattern(one: _Schema) -> object:
    return next(iter(one.get("patternProperties", {}).values()), None)


def _kinds(one: _Schema) -> str:
    """What may stand there, in words."""
    if "anyOf" in one:
        return " or ".join(_kinds(each) for each in one["anyOf"] if each.get("type") != "null")
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    kind = one.get("type")
    if kind == "boolean":
        return "`true`, `false`"
    if kind == "object":
        return "settings by name"
    if kind == "array":
        if "prefixItems" in one:
            return f"list of {len(one['prefixItems'])}: {', '.join(_kinds(each) for each in one['prefixItems'])}"
        return f"list of {'settings' if '$ref' in one['items'] else _kinds(one['items'])}"
    bounds = [f"{sign} {one[bound]:,}" for bound, sign in _BOUNDS.items() if bound in one]
    pattern = f" like `{one['pattern']}`".replace("|", "\\|") if "pattern" in one else ""
    return " ".join([_PLAIN[str(kind)], ", ".join(bounds)]).strip() + pattern


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return "none" if value in ([], {}) else f"`{value if isinstance(value, str) else json.dumps(value)}`"
