"""What validates each rendered object: Kubernetes' own schemas, the RayCluster definition, and two small ones of ours.

Gateway API and the Prometheus operator have no schemas here; what the chart uses of them is written down below after
their API references (gateway.networking.k8s.io/v1, monitoring.coreos.com/v1), so a misspelt key is noticed.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from tests.deploy.chart import Object, Rendered, objects_in, render

KUBERNETES = "1.33"

_NAMES = {"type": "array", "items": {"type": "string"}}
_METADATA = {"type": "object", "required": ["name", "namespace", "labels"]}


def _object(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _document(spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": _METADATA, "spec": spec},
    )


_PARENT = _object(["name"], {key: {"type": "string"} for key in ("name", "namespace", "sectionName", "group", "kind")})
_BACKEND = _object(["name", "port"], {"name": {"type": "string"}, "port": {"type": "integer"}})
_ROUTE = _object(
    ["parentRefs", "rules"],
    {
        "parentRefs": {"type": "array", "minItems": 1, "items": _PARENT},
        "hostnames": _NAMES,
        "rules": {
            "type": "array",
            "items": _object(["backendRefs"], {"backendRefs": {"type": "array", "items": _BACKEND}}),
        },
    },
)
_ENDPOINT = _object(
    ["port", "path"],
    {
        **{key: {"type": "string"} for key in ("port", "path", "interval")},
        "authorization": _object(
            ["credentials"],
            {"credentials": _object(["name", "key"], {key: {"type": "string"} for key in ("name", "key")})},
        ),
        "scheme": {"enum": ["http", "https"]},
        "tlsConfig": _object(
            [],
            {
                "serverName": {"type": "string"},
                "ca": _object(
                    ["secret"],
                    {"secret": _object(["name", "key"], {key: {"type": "string"} for key in ("name", "key")})},
                ),
            },
        ),
    },
)
_MONITOR = _object(
    ["selector", "endpoints"],
    {
        "selector": _object(["matchLabels"], {"matchLabels": {"type": "object"}}),
        "endpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
    },
)
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_RULE = _object(
    ["alert", "expr", "labels", "annotations"],
    {**{key: {"type": "string"} for key in ("alert", "expr", "for")}, "labels": _STRINGS, "annotations": _STRINGS},
)
_RULES = _object(
    ["groups"],
    {
        "groups": {
            "type": "array",
            "items": _object(
                ["name", "rules"], {"name": {"type": "string"}, "rules": {"type": "array", "items": _RULE}}
            ),
        }
    },
)
_OURS = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _document(_ROUTE),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _document(_ROUTE),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _document(_MONITOR),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _document(_RULES),
}


def _strict(schema: Any) -> Any:
    """The definition's schema, refusing keys it does not know: the API server would drop them without a word."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
    return strict


@functools.cache
def _raycluster() -> jsonschema.Draft7Validator:
    text = Path(__file__).with_name("data").joinpath("raycluster.v1.json").read_text()
    schema = _strict(json.loads(text))
    schema["properties"]["metadata"] = _METADATA
    return jsonschema.Draft7Validator(schema)


def validate(document: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError, or kubernetes-validate's for a kind or a version nobody knows."""
    _validate(json.dumps(document, sort_keys=True))


def rendered_with(values: Object) -> Rendered:
    """The chart with these values, all of it valid."""
    files = render(values)
    found = Rendered(files, objects_in(files))
    for each in found.objects:
        validate(each)
    return found


@functools.cache
def _validate(text: str) -> None:
    """The same object in several variants is looked at once: finding a kind's schema takes longer than using it."""
    document = json.loads(text)
    kind = document["apiVersion"], document["kind"]
    if kind == ("ray.io/v1", "RayCluster"):
        _raycluster().validate(document)
    elif kind in _OURS:
        jsonschema.validate(document, _OURS[kind])
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
