"""Bodies at random, most of them nearly right: every field with values that are good, possible or absurd, and bytes
that are no JSON at all."""

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from hypothesis import strategies as st

from router.front.unsupported import INTERNAL, NEUTRAL

Json = dict[str, Any]

_NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 0.5, 1.5, 16, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0])
_TEXT = st.sampled_from(["", "hi", "é🌶", "\x00", "\ufffd", "x" * 2000, "</s>", "auto", "required", "tracer", "{}"])
_ANY = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT | st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_CALL = st.fixed_dictionaries(
    {"id": _TEXT, "type": st.just("function"), "function": st.just({"name": "f", "arguments": "{}"})}
)
_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": _TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT}), max_size=2),
    },
    optional={"tool_calls": st.lists(_CALL, max_size=2), "name": _TEXT, "tool_call_id": _TEXT},
)
_NESTED = st.integers(0, 500).map(lambda depth: reduce(lambda inside, _: {"a": inside}, range(depth), Json()))
_FUNCTION = st.fixed_dictionaries({"name": st.sampled_from(["f", "a b", ""])}, optional={"parameters": _NESTED})
_TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": _FUNCTION})
_ROLES = st.sampled_from(["system", "user", "assistant"])
_GOOD_PROMPT = st.text(min_size=1, max_size=40) | st.lists(st.integers(0, 299), min_size=1, max_size=40)
_GOOD_MESSAGES = st.lists(st.fixed_dictionaries({"role": _ROLES, "content": st.text(max_size=20)}), min_size=1)
_IDS = st.lists(st.integers(-1, 300), max_size=600)
_PROMPT = st.text(max_size=40) | _IDS | st.lists(st.text(max_size=8) | _IDS, max_size=4)
_SHORT = st.integers(-1, 20)
_FLAG = st.booleans() | st.none()
_RARELY: Mapping[str, st.SearchStrategy[object]] = {
    "n": st.integers(0, 4),
    "max_tokens": _SHORT,
    "max_completion_tokens": _SHORT,
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 400),
    "seed": st.integers(-(2**64), 2**65),
    "stop": _TEXT | st.lists(_TEXT, max_size=20),
    "stop_token_ids": st.lists(st.integers(-1, 301), max_size=130),
    "logprobs": _FLAG | st.integers(-1, 22),
    "top_logprobs": st.integers(-1, 22),
    "best_of": st.integers(0, 4),
    "stream": _FLAG,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": _FLAG, "include_obfuscation": _FLAG}),
    "echo": _FLAG,
    "prompt_logprobs": st.integers(-1, 22),
    "tools": st.lists(_TOOL, max_size=3),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    "user": _TEXT,
    "metadata": st.dictionaries(_TEXT, _TEXT, max_size=2),
    "chat_template_kwargs": st.dictionaries(_TEXT, _ANY, max_size=2),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "add_generation_prompt", "continue_final_message"), _FLAG),
}
_STRANGE = st.dictionaries(
    st.sampled_from(sorted([*_RARELY, *NEUTRAL, *INTERNAL, "prompt", "messages", "model"])) | st.text(max_size=8),
    _ANY,
    max_size=2,
)


@st.composite
def _objects(draw: st.DrawFn) -> Json:
    """Most are good but for a field or two. Each path finds its prompt among these fields."""
    fields: Json = {
        "model": "tracer",
        "max_tokens": 8,
        "prompt": draw(st.one_of(_GOOD_PROMPT, _GOOD_PROMPT, _PROMPT)),
        "messages": draw(st.one_of(_GOOD_MESSAGES, _GOOD_MESSAGES, st.lists(_MESSAGE, max_size=3))),
        "tokens": draw(_IDS),
    }
    for name in draw(st.lists(st.sampled_from(sorted(_RARELY)), max_size=3)):
        fields[name] = draw(_RARELY[name])
    return fields | (draw(_STRANGE) if draw(st.integers(0, 2)) == 0 else {})


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """A body of which some bytes were overwritten, or the end was lost."""
    whole = bytearray(json.dumps(draw(_objects())).encode())
    for at, byte in draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=3)):
        whole[at] = byte
    return bytes(whole[: draw(st.integers(0, len(whole)))])


_GOOD_JSON = _objects().map(lambda fields: json.dumps(fields).encode())
BODIES = st.one_of(
    _GOOD_JSON, _GOOD_JSON, _GOOD_JSON, _damaged(), _ANY.map(lambda value: json.dumps(value).encode()), st.binary()
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"] * 3 + ["/tokenize", "/detokenize"])
