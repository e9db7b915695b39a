"""One table of ranges: what the front door refuses is what the document forbids."""

import math
from typing import Any

import pytest

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from router.front.openapi.document import document
from router.front.ranges import Range, ranges
from router.requests import Limits

SETTINGS = RouterSettings(max_n=3, max_logprobs=7, max_stop_strings=2)
RANGES = ranges(SETTINGS)


def taken(allowed: Range, value: float) -> bool:
    try:
        allowed.check("x", value)
    except InvalidRequest:
        return False
    return True


def in_schema(schema: dict[str, int], value: float) -> bool:
    at_least, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
    return at_least <= value <= schema["maximum"] and value > above


def bodies(workers: Limits | None) -> dict[str, Any]:
    described: dict[str, Any] = document("1", "m", SETTINGS, workers)
    schemas: dict[str, Any] = described["components"]["schemas"]
    return schemas


@pytest.mark.parametrize("name", RANGES)
def test_the_edges_in_both_words(name: str) -> None:
    allowed = RANGES[name]
    step = 1 if abs(allowed.low) > 1 << 50 else 0.5
    edges = [edge + change for edge in (allowed.low, allowed.high) for change in (-step, 0, step)]
    if step == 1:
        edges = [int(edge) for edge in edges]
    assert [taken(allowed, edge) for edge in edges] == [in_schema(allowed.schema, edge) for edge in edges]
    assert {taken(allowed, edge) for edge in edges} == {True, False}
    assert not taken(allowed, math.nan)


def test_the_document_shows_settings_and_what_the_workers_hold() -> None:
    workers = Limits(max_context=100, pool_tokens=1000, block_size=10, vocab_size=50, eos_ids=())
    with_workers = bodies(workers)
    chat, completion = with_workers["ChatBody"]["properties"], with_workers["CompletionBody"]["properties"]
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert completion["best_of"]["anyOf"][0] == chat["n"]["anyOf"][0]
    assert chat["top_logprobs"]["anyOf"][0]["maximum"] == completion["logprobs"]["anyOf"][0]["maximum"] == 7
    assert chat["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert chat["stop"]["anyOf"][1]["maxItems"] == 2
    assert completion["prompt"]["anyOf"][1]["items"] == {"type": "integer", "minimum": 0, "maximum": 49}
    without = bodies(None)["CompletionBody"]["properties"]
    assert without["prompt"]["anyOf"][1]["items"] == {"type": "integer", "minimum": 0}
