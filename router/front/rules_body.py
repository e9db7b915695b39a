"""Fields of a body that rule what may be drawn: penalties, bias, min_p, min_tokens, what the answer must look like."""

import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from router.front.bounds import MAX_LOGIT_BIAS
from router.front.chat_bodies import Body
from router.front.grammar_fields import GRAMMAR_FIELDS, grammar_of
from router.requests import Grammar

_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_BIAS = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ]
}
_ANY_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}
_TEXT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}
_TEXTS = {"anyOf": [{"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}, {"type": "null"}]}
_FLAG = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}


def _bias(value: object) -> object:
    """An object of token ids, which JSON can only write as strings, to numbers."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens can be biased")
    if not all(_TOKEN_ID.fullmatch(key) and type(bias) in (int, float) for key, bias in value.items()):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    return tuple((int(key), float(bias)) for key, bias in value.items())


class RulesBody(Body):
    """Fields of both inference endpoints; engine/rules.py and engine/sampler.py say what they do to a draw."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias), WithJsonSchema(_BIAS)] = ()
    # Of these the shape is read by grammar_fields.py, which names the field within them.
    response_format: Annotated[object, WithJsonSchema(_ANY_OBJECT)] = None
    guided_json: Annotated[object, WithJsonSchema(_SCHEMA)] = None
    guided_json_object: Annotated[object, WithJsonSchema(_FLAG)] = None
    guided_regex: Annotated[object, WithJsonSchema(_TEXT)] = None
    guided_choice: Annotated[object, WithJsonSchema(_TEXTS)] = None
    guided_grammar: Annotated[object, WithJsonSchema(_TEXT)] = None
    structured_outputs: Annotated[object, WithJsonSchema(_ANY_OBJECT)] = None

    def grammar(self) -> tuple[Grammar | None, str]:
        """What the answer must look like, and the field that says so. Raises InvalidRequest naming the field."""
        given = GRAMMAR_FIELDS.keys() & self.model_fields_set
        if not given:  # nearly all
            return None, ""
        return grammar_of({name: getattr(self, name) for name in given}) or (None, "")
