"""What an answer must look like, under every name that clients know for it, as one `Grammar`.

OpenAI's `response_format`, and what other servers add: `guided_json`, `guided_json_object`, `guided_regex`,
`guided_choice`, `guided_grammar`, and `structured_outputs` with json, json_object, regex, choice or grammar inside. A
request may use one of them. Whether the source is a grammar at all is judged elsewhere: only its shape is read here.
"""

import json
from collections.abc import Callable, Mapping

import orjson

from cluster.core.errors import InvalidRequest
from router.requests import Grammar

MAX_CHOICES = 1024
Found = tuple[Grammar, str]
"""A grammar, and the field that asked for it."""


def grammar_of(fields: Mapping[str, object]) -> Found | None:
    """The grammar that a body's fields (those of GRAMMAR_FIELDS, parsed from JSON) ask for; None: they ask for none.

    Raises InvalidRequest naming the field.
    """
    found = [asked for name, read in GRAMMAR_FIELDS.items() if (asked := read(fields.get(name), name)) is not None]
    if len(found) > 1:
        message = f"{found[0][1]} and {found[1][1]} both say what the answer must look like"
        raise InvalidRequest(message, param=found[1][1])
    return found[0] if found else None


def choice_grammar(texts: list[str], param: str) -> Grammar:
    """One of these texts, exactly. Raises InvalidRequest naming `param`."""
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequest(f"{param} must hold 1 to {MAX_CHOICES} texts, none of them empty", param=param)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _response_format(value: object, param: str) -> Found | None:
    if value is None:
        return None
    kind = _object(value, param).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object"), param
    if kind != "json_schema":
        message = f"{param}.type must be text, json_object or json_schema"
        raise InvalidRequest(message, param=f"{param}.type", code="unsupported_parameter")
    inside = f"{param}.json_schema"
    format_ = _object(_object(value, param).get("json_schema"), inside)
    schema = _object(format_.get("schema"), f"{inside}.schema")
    return _schema(schema, f"{inside}.schema")


def _json(value: object, param: str) -> Found | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return _schema(_object(value, param), param)
    try:
        return _schema(_object(orjson.loads(value), param), param)
    except orjson.JSONDecodeError:
        raise InvalidRequest(f"{param} is no JSON", param=param) from None


def _json_object(value: object, param: str) -> Found | None:
    if value is None or value is False:
        return None
    if value is not True:
        raise InvalidRequest(f"{param} must be true or false", param=param)
    return Grammar("json_object"), param


def _regex(value: object, param: str) -> Found | None:
    return None if value is None else (Grammar("regex", _text(value, param)), param)


def _grammar(value: object, param: str) -> Found | None:
    return None if value is None else (Grammar("lark", _text(value, param)), param)


def _choice(value: object, param: str) -> Found | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{param} must be a list of strings", param=param)
    return choice_grammar(value, param), param


def _structured_outputs(value: object, param: str) -> Found | None:
    if value is None:
        return None
    inside = _object(value, param)
    if inside.get("structural_tag") is not None:
        tag = f"{param}.structural_tag"
        raise InvalidRequest(f"{tag} is not supported", param=tag, code="unsupported_parameter")
    found = [
        asked for name, read in _STRUCTURED.items() if (asked := read(inside.get(name), f"{param}.{name}")) is not None
    ]
    if len(found) != 1:
        message = f"{param} must hold exactly one of {', '.join(_STRUCTURED)}"
        raise InvalidRequest(message, param=param)
    return found[0]


def _schema(schema: dict[str, object], param: str) -> Found:
    try:
        return Grammar("json_schema", orjson.dumps(schema).decode()), param
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _object(value: object, param: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a string that is not empty", param=param)
    return value


Reader = Callable[[object, str], Found | None]
_STRUCTURED: dict[str, Reader] = {
    "json": _json, "json_object": _json_object, "regex": _regex, "choice": _choice, "grammar": _grammar,
}  # fmt: skip
GRAMMAR_FIELDS: dict[str, Reader] = {
    "response_format": _response_format,
    "guided_json": _json,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
