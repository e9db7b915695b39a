"""The document of one router, served at /openapi.json (https://spec.openapis.org/oas/v3.1.0).

The endpoints are plain ASGI, so nothing is derived from them: this file says which body and which answers each has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import TypeAdapter

from cluster.core.config import RouterSettings
from router.front.auth import OPEN
from router.front.bodies import ChatBody, CompletionBody
from router.front.http_tokens import DetokenizeBody, TokenizeBody
from router.front.openai_shapes import Json
from router.front.openapi import answers
from router.front.openapi.limits import Schema, limit
from router.requests import Limits

Schemas = dict[str, dict[str, dict[str, object]]]
"""Name -> schema; of those here only objects with properties are looked into."""

_MODES: dict[str, Literal["validation", "serialization"]] = {"body": "validation", "answer": "serialization"}
_REF = "#/components/schemas/{model}"
_TRYABLE = {429: "no room now; see Retry-After", 503: "no worker can serve this now", 504: "not done in time"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `statuses`: errors beside those that every operation with a body has."""

    method: str
    path: str
    summary: str
    answer: type | str
    """A type of answers.py, or the media type of an answer that is no JSON."""
    body: type | None = None
    streams: bool = False
    parameters: tuple[str, ...] = ()
    statuses: Mapping[int, str] = field(default_factory=dict)


_NO_MODEL = {404: "no such model"}
OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a conversation", answers.ChatCompletion, ChatBody,
        streams=True, statuses=_NO_MODEL | _TRYABLE,
    ),
    Operation(
        "post", "/v1/completions", "Go on with a text", answers.Completion, CompletionBody,
        streams=True, statuses=_NO_MODEL | _TRYABLE,
    ),
    Operation("post", "/tokenize", "The ids of a prompt", answers.Tokenized, TokenizeBody, statuses=_NO_MODEL),
    Operation("post", "/detokenize", "The text of ids", answers.Detokenized, DetokenizeBody, statuses=_NO_MODEL),
    Operation("get", "/v1/models", "The one model that is served", answers.Models),
    Operation("get", "/v1/models/{model}", "A model", answers.Model, parameters=("model",), statuses=_NO_MODEL),
    Operation("get", "/live", "Whether the router runs", answers.Live),
    Operation("get", "/ready", "Whether a request would be taken", answers.Ready),
    Operation("get", "/health", "The same, under the name that vLLM's clients ask for", answers.Ready),
    Operation("get", "/metrics", "For Prometheus, at router.admin_port", "text/plain"),
    Operation("get", "/usage", "What tenants used, and what it costs, at router.admin_port", dict[str, object]),
    Operation("get", "/status", "Workers, queue and gauges, at router.admin_port", dict[str, object]),
)  # fmt: skip
_KEY_STATUSES = {
    401: "tenants are configured, and this key is no one's",
    403: "the key is no operator's",
}
_BODY_STATUSES = {
    400: "the request cannot be served as it stands; `param` names the field",
    408: "the body did not come to an end",
    413: "the body is too large",
    415: "the body says that it is no JSON",
    500: "the answer could not be finished",
}


def document(version: str, model: str, settings: RouterSettings, workers: Limits | None) -> Json:
    """The whole document. `model`: the one that is served, which is the only one that a body may name."""
    schemas: Schemas = {}
    paths: dict[str, dict[str, object]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    for name in (kind.__name__ for kind in (ChatBody, CompletionBody)):
        schemas[name]["properties"]["model"] = {"const": model}
        limit(cast("dict[str, Schema]", schemas[name]["properties"]), settings, workers)
    for name in (kind.__name__ for kind in (TokenizeBody, DetokenizeBody)):
        schemas[name]["properties"]["model"] = {"enum": [model, None]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version, "description": "OpenAI's API, served from split pools"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(operation: Operation, schemas: Schemas) -> Json:
    described: Json = {"summary": operation.summary, "operationId": _name(operation)}
    if operation.parameters:
        text = {"type": "string"}
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in operation.parameters
        ]
    statuses: dict[int, str] = dict(operation.statuses)
    if operation.body is not None:
        content = {"application/json": {"schema": _schema(operation.body, "body", schemas)}}
        described["requestBody"] = {"required": True, "content": content}
        statuses |= _BODY_STATUSES
    if operation.path not in OPEN:
        statuses |= _KEY_STATUSES
    success = _success(operation, schemas)
    errors = {str(status): _error(text, schemas) for status, text in sorted(statuses.items())}
    if operation.answer is answers.Ready:
        errors["503"] = {"description": "no request would be taken", "content": success["content"]}
    described["responses"] = {"200": success, **errors}
    return described


def _success(operation: Operation, schemas: Schemas) -> Json:
    if isinstance(operation.answer, str):
        return {"description": "as asked", "content": {operation.answer: {"schema": {"type": "string"}}}}
    content: Json = {"application/json": {"schema": _schema(operation.answer, "answer", schemas)}}
    if operation.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for events
    return {"description": "as asked", "content": content}


def _error(text: str, schemas: Schemas) -> Json:
    schema = _schema(answers.ErrorAnswer, "answer", schemas)
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _schema(kind: type, use: str, schemas: Schemas) -> object:
    """A reference to the schema of `kind`, which is put among `schemas` with all it refers to."""
    made = TypeAdapter(kind).json_schema(mode=_MODES[use], ref_template=_REF)
    for name, schema in made.pop("$defs", {}).items():
        schemas[name] = schema
    name = made.get("title")
    if not isinstance(name, str):
        return made
    schemas[name] = made
    return {"$ref": _REF.format(model=name)}


def _name(operation: Operation) -> str:
    words = operation.path.removeprefix("/v1").replace("{", "").replace("}", "").replace("/", "_")
    return operation.method + words
