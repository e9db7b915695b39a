"""A body's JSON to its fields, after a look at what it would cost to read (FAULTS S07).

Reading takes the event loop, on which every stream waits: three megabytes of an object with 300,000 names 0.13 s. So
what has too many parts is refused by its bytes, and what is nested too deeply before anything goes into it by calls of
itself.
"""

from collections.abc import Set
from functools import cache

import msgspec
import numpy as np
import orjson

from cluster.core.errors import InvalidRequest

MAX_DEPTH = 200
MAX_PARTS = 50_000
_BLOCK = 1 << 14  # bytes looked at together: a near cache has room for what is made of them
_QUOTE, _BACKSLASH, _OBJECT, _LIST = b'"\\{['
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def json_object(raw: bytes, known: Set[str]) -> dict[str, object]:
    """A body's fields, of which those that are `known` are looked into. Raises InvalidRequest."""
    if len(raw) > 2 * MAX_PARTS and parts(raw) > MAX_PARTS:
        name = _longest(raw, frozenset(known))
        message = f"{name or 'the body'} has more than {MAX_PARTS} objects, lists and strings"
        raise InvalidRequest(message, param=name, code="invalid_value" if name else "invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        message = f"the body is no valid JSON in UTF-8: {error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidRequest(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:  # those in texts count too: it may be less deep
        for name in known & value.keys():
            if _is_deeper(value[name], MAX_DEPTH):
                raise InvalidRequest(f"{name} has more than {MAX_DEPTH} objects or lists within each other", param=name)
    return value


def parts(raw: bytes, enough: int = MAX_PARTS) -> int:
    """How many objects, lists and strings a JSON text has; what is written in its strings is none.

    Up to `enough` it may be some more than there are, since texts may be full of brackets and quotes; of what is more
    than enough not all are counted.
    """
    text = np.frombuffer(raw, np.uint8)
    most = sum(int(np.count_nonzero(text == sign)) for sign in (_OBJECT, _LIST))
    most += int(np.count_nonzero(text == _QUOTE)) // 2
    if most <= enough:
        return most
    opened = quotes = backslashes = 0
    inside = False
    for start in range(0, len(text), _BLOCK):
        block = text[start : start + _BLOCK]
        before, backslashes = _backslashes(block, backslashes)
        quote = (block == _QUOTE) & (before % 2 == 0)  # after an odd number of them it is part of its string
        within = (np.cumsum(quote, dtype=np.uint8) + inside) % 2 == 1
        opened += int(np.count_nonzero(((block == _OBJECT) | (block == _LIST)) & ~within))
        quotes += int(np.count_nonzero(quote))
        inside = bool(within[-1])
        if opened + quotes // 2 > enough:
            break
    return opened + quotes // 2


def _backslashes(block: Bytes, run: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], int]:
    """How many stand right before each byte, and at the end; `run`: before the first."""
    place = np.arange(len(block), dtype=np.int32)
    other = np.maximum.accumulate(np.where(block == _BACKSLASH, np.int32(-1 - run), place))  # the last that is none
    here = place - other  # at and before each byte
    return np.concatenate((np.array([run], np.int32), here[:-1])), int(here[-1])


def _longest(raw: bytes, known: frozenset[str]) -> str | None:
    """The known field that most of a body is; None where there is no such one. Nothing of it is built."""
    try:
        fields = msgspec.json.decode(raw, type=_fields(known))
    except (msgspec.MsgspecError, RecursionError):  # it is no JSON, or too deep: then no field is to be named
        return None
    sizes = {name: len(getattr(fields, name)) for name in known}
    name = max(sizes, key=sizes.__getitem__, default=None)
    return name if name is not None and 2 * sizes[name] > len(raw) else None


@cache
def _fields(known: frozenset[str]) -> type[msgspec.Struct]:
    return msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(known)])


def _is_deeper(value: object, depth: int) -> bool:
    """Whether more than so many objects and lists lie within each other."""
    level: list[object] = [value]
    for _ in range(depth):
        insides = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inside for values in insides for inside in values if isinstance(inside, dict | list)]
    return bool(level)
