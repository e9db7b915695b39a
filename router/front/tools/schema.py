"""What an answer must be when a call is demanded: a JSON schema for the grammar that guides the model."""

import json

from router.front.tools.types import Tool, ToolUse


def demanded(use: ToolUse) -> str | None:
    """The schema of the whole answer, as JSON; None when calling is left to the model.

    `required`: a list of calls, at least one; a named function: its arguments alone.
    """
    if use.named is not None:
        return json.dumps(_parameters(next(tool for tool in use.tools if tool.name == use.named)))
    if not use.must:
        return None
    schema: dict[str, object] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool, f"#/$defs/{number}") for number, tool in enumerate(use.tools)]},
        "$defs": {
            str(number): _within(_parameters(tool), f"#/$defs/{number}") for number, tool in enumerate(use.tools)
        },
    }
    if not use.parallel:
        schema["maxItems"] = 1
    return json.dumps(schema)


def _call(tool: Tool, arguments: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> dict[str, object]:
    """A function without a schema takes an object of anything."""
    return tool.parameters or {"type": "object"}


def _within(schema: object, place: str) -> object:
    """A schema that was a document, now at `place` in another: what it refers to within itself has moved with it."""
    if isinstance(schema, list):
        return [_within(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _within(part, place) for name, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
