"""The limits of the front door in the document's words: numbers from ranges.py, lengths from bounds.py, the settings
and the workers.

What several fields say together - a prompt and its answers that do not fit, options that contradict each other - is
not said here; such requests get a 400 that names the field.
"""

from collections.abc import Iterator
from typing import cast

from cluster.core.config import RouterSettings
from router.front.bodies import MAX_PROMPTS
from router.front.bounds import MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS
from router.front.ranges import ranges
from router.requests import Limits

Schema = dict[str, object]

_SPELT = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs", "n": "best_of"}


def limit(properties: dict[str, Schema], settings: RouterSettings, workers: Limits | None) -> None:
    """Write the limits into the properties of an inference body. `workers`: None while none is known."""
    for name, allowed in ranges(settings).items():
        for spelling in (name, _SPELT.get(name, name)):
            for kind in _kinds(properties.get(spelling, {}), "integer", "number"):
                kind.update(allowed.schema)
    ids: Schema = {"type": "integer", "minimum": 0}
    prompt: Schema = {"type": "array", "minItems": 1, "items": ids}
    if workers is not None:
        ids["maximum"] = workers.vocab_size - 1
        prompt["maxItems"] = workers.max_context - 1
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    stops: Schema = {"type": "array", "maxItems": settings.max_stop_strings, "items": stop}
    properties["stop"]["anyOf"] = [stop, stops, {"type": "null"}]
    del properties["stop_token_ids"]["type"], properties["stop_token_ids"]["items"]
    stop_ids = {"type": "array", "maxItems": MAX_STOP_TOKEN_IDS, "items": ids}
    properties["stop_token_ids"]["anyOf"] = [stop_ids, {"type": "null"}]
    if "messages" in properties:
        properties["messages"]["minItems"] = 1
    if "prompt" in properties:
        text: Schema = {"type": "string", "minLength": 1}
        several = {"type": "array", "minItems": 1, "maxItems": min(MAX_PROMPTS, settings.max_choices)}
        properties["prompt"]["anyOf"] = [text, prompt, {**several, "items": text}, {**several, "items": prompt}]


def _kinds(schema: Schema, *types: str) -> Iterator[Schema]:
    """The alternatives of a schema that are of one of these types."""
    for kind in cast("list[Schema]", schema.get("anyOf", [schema])):
        if kind.get("type") in types:
            yield kind
