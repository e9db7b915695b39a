"""What a body costs to read is known from its bytes: parts are counted right, whatever is written in its strings."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import InvalidRequest
from router.front import json_body
from router.front.json_body import MAX_PARTS, json_object, parts

TEXTS = st.text(st.sampled_from('a"\\{[:,é\n'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(TEXTS, inside, max_size=4),
    max_leaves=30,
)


def counted(value: object) -> int:
    """Objects, lists and strings, names included, one by one."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    return int(isinstance(value, str))


@given(value=VALUES, spaces=st.sampled_from([None, 2]), block=st.integers(1, 40))
def test_parts_are_counted_whatever_is_written_in_texts(value: object, spaces: int | None, block: int) -> None:
    raw = json.dumps(value, ensure_ascii=False, indent=spaces).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_BLOCK", block)
        right = counted(value)
        assert right <= parts(raw)
        assert right == parts(raw, right)
        assert parts(raw, right - 1) > right - 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {str(token): 1 for token in range(MAX_PARTS)}}, "logit_bias"),
        ({"messages": [{}] * MAX_PARTS, "logit_bias": {}}, "messages"),
        ({"stop": ["\\"] * MAX_PARTS, "prompt": "short"}, "stop"),
        ({"stop": ["a"] * MAX_PARTS, "prompt": [[]] * MAX_PARTS, "messages": [[]] * MAX_PARTS}, None),
        ({"unknown": {'"\\': [["["] * MAX_PARTS]}}, None),
    ],
    ids=["logit_bias", "messages", "stop", "several", "unknown"],
)
def test_too_many_parts_are_refused(fields: dict[str, Any], named: str | None) -> None:
    raw = json.dumps(fields).encode()
    for known in ({"logit_bias", "messages", "stop", "prompt"}, set[str]()):
        who = named if known else None
        with pytest.raises(InvalidRequest, match=f"^{who or 'the body'} has more than {MAX_PARTS} objects") as caught:
            json_object(raw, known)
        assert caught.value.param == who


@pytest.mark.parametrize("raw", [b"[" * 3_000_000, b'{"stop": ' * 300_000, b'{"stop": ["a"' + b', ["a"' * MAX_PARTS])
def test_what_is_no_json_is_refused_all_the_same(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"^the body has more than {MAX_PARTS} objects"):
        json_object(raw, {"stop"})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": json.dumps([{"a": ["b"]}] * MAX_PARTS)},
        {"prompt": '\\"[' * MAX_PARTS},
        {"prompt": list(range(2 * MAX_PARTS))},
        {"messages": [{"role": "user", "content": "hello"}] * (MAX_PARTS // 5 - 1)},
    ],
    ids=["JSON in a text", "brackets and quotes", "ids", "messages"],
)
def test_long_texts_many_ids_and_many_messages_are_taken(fields: dict[str, Any]) -> None:
    assert json_object(json.dumps(fields).encode(), set()) == fields
