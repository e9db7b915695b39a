"""A prompt's own tokens as clients read them: offsets into the text that is echoed, labels, ranks, nulls, any parts."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest
from cluster.scores import Scores
from router.front.ask import Ask
from router.front.bodies import CompletionBody
from router.front.bounds import check_scored
from router.front.openai_shapes import AnswerHead, ChatShape, CompletionShape, WholeSample
from router.front.prompt_scores import EchoedLogprobs, PromptLogprobs, PromptPart, ShownPrompt, likely
from router.front.text import Delta
from router.front.tokenizer import TracerTokenizer
from router.front.usage import Usage

BEGIN = 256


class Tokenizer(TracerTokenizer):
    """Bytes, two pairs of them in one token, and one special token."""

    def __init__(self, spaces: int = 0) -> None:
        self.leading_spaces = spaces

    def token_bytes(self, token_id: int) -> bytes | None:
        return None if token_id == BEGIN else {257: b"ab", 258: b"\xa9\xc3"}.get(token_id) or bytes((token_id,))

    def label(self, token_id: int) -> str:
        return "<s>" if token_id == BEGIN else super().label(token_id)


def parts(ids: Sequence[int], top: int = 2, cuts: Iterable[int] = (), index: int = 0) -> list[PromptPart]:
    """What a worker would tell of `ids`: its numbers are the positions."""
    rows = np.arange(1, len(ids), dtype=np.int32)
    logprobs = -rows[:, None] - np.arange(1 + top, dtype=np.float32) / 4
    likely = np.stack([rows * 0 + 65 + at for at in range(top)], axis=1) if top else np.empty((len(rows), 0), np.int32)
    bounds = [1, *sorted({cut for cut in cuts if 1 < cut < len(ids)}), len(ids)]
    told = [PromptPart(index, 0, tuple(ids[:1]), None)]
    for start, end in pairwise(bounds):
        if start < end:
            at = slice(start - 1, end - 1)
            scores = Scores(start, logprobs[at].astype(np.float32), likely[at], rows[at])
            told.append(PromptPart(index, start, tuple(ids[start:end]), scores))
    return told


def echoed(text: str, ids: Sequence[int], tokenizer: Tokenizer, top: int = 2, cuts: Iterable[int] = ()) -> dict:  # type: ignore[type-arg]
    written = EchoedLogprobs(text, tokenizer, top)
    for part in parts(ids, top, cuts):
        written.add(part)
    nothing: dict[str, list[object]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    value = orjson.loads(orjson.dumps(written.json(nothing)))
    assert isinstance(value, dict)
    return value


@given(text=st.text(min_size=1, max_size=30), cuts=st.sets(st.integers(1, 90)))
def test_offsets_are_the_characters_that_are_complete_before_a_token(text: str, cuts: set[int]) -> None:
    ids = list(text.encode("utf-8", "replace"))
    text = bytes(ids).decode()
    found = echoed(text, ids, Tokenizer(), cuts=cuts)
    assert found["text_offset"] == [len(bytes(ids[:at]).decode("utf-8", "ignore")) for at in range(len(ids))]
    assert found["token_logprobs"] == [None, *(-float(at) for at in range(1, len(ids)))]
    assert found == echoed(text, ids, Tokenizer())


@pytest.mark.parametrize(
    ("text", "ids", "spaces", "offsets"),
    [
        ("abc", [BEGIN, 257, ord("c")], 0, [0, 0, 2]),  # the tokenizer's own: not in the text
        ("<s>abc", [BEGIN, 257, ord("c")], 0, [0, 3, 5]),  # written by the client
        ("a<s>b", [97, BEGIN, 98], 0, [0, 1, 4]),
        ("é©x", [0xC3, 258, 0xA9, 120], 0, [0, 0, 1, 2]),
        ("hi", [BEGIN, 32, ord("h"), ord("i")], 1, [0, 0, 0, 1]),  # SentencePiece's space is not the text's
        ("x", [257, 257, 257], 0, [0, 1, 1]),  # a tokenizer that changes the text: never beyond its end
    ],
)
def test_offsets(text: str, ids: list[int], spaces: int, offsets: list[int]) -> None:
    assert echoed(text, ids, Tokenizer(spaces))["text_offset"] == offsets


def test_the_four_lists() -> None:
    found = echoed("<s>zA", [BEGIN, ord("z"), ord("A")], Tokenizer(), top=1)
    assert found == {
        "tokens": ["<s>", "z", "A"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"A": -1.25, "z": -1.0}, {"A": -2.0}],
        "text_offset": [0, 3, 4],
    }
    assert echoed("z", [ord("z")], Tokenizer())["top_logprobs"] == [None]
    assert echoed("zz", [ord("z")] * 2, Tokenizer(), top=0)["top_logprobs"] == [None, {"z": -1.0}]


def listed(ids: Sequence[int], top: int, cuts: Iterable[int] = (), asked: int | None = None) -> object:
    written = PromptLogprobs(Tokenizer(), top)
    for part in parts(ids, top if asked is None else asked, cuts):
        written.add(part)
    return orjson.loads(orjson.dumps(written.json()))


def test_vllm_s_list() -> None:
    """The prompt's token first; one of the likeliest is named once, with the rank that it has."""
    ids = [BEGIN, 0xC3, ord("A")]
    rows = [
        None,
        {
            "195": {"logprob": -1.0, "rank": 1, "decoded_token": "\ufffd"},
            "65": {"logprob": -1.25, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
        },
        {
            "65": {"logprob": -2.0, "rank": 2, "decoded_token": "A"},
            "66": {"logprob": -2.5, "rank": 2, "decoded_token": "B"},
        },
    ]
    assert listed(ids, 2) == listed(ids, 2, cuts=[2]) == listed(ids, 2, asked=5) == rows
    assert listed([BEGIN], 2) == [None]
    assert listed([97, BEGIN], 0) == [None, {"256": {"logprob": -1.0, "rank": 1, "decoded_token": "<s>"}}]


def test_what_no_model_would_write_has_openai_s_lowest_number() -> None:
    scores = Scores(1, np.array([[-np.inf]], np.float32), np.empty((1, 0), np.int32), np.array([7], np.int32))
    written = PromptLogprobs(Tokenizer(), 0)
    written.add(PromptPart(0, 1, (97,), scores))
    assert orjson.loads(orjson.dumps(written.json())) == [{"97": {"logprob": -9999.0, "rank": 7, "decoded_token": "a"}}]


def shape(prompts: list[ShownPrompt], top: int | None = 1) -> CompletionShape:
    return CompletionShape(AnswerHead("id", 1, "m", Tokenizer(), top), prompts)


def test_every_choice_shows_its_prompt_and_a_stream_shows_it_once() -> None:
    tokenizer = Tokenizer()
    prompts = [
        ShownPrompt(text, EchoedLogprobs(text, tokenizer, 1), PromptLogprobs(tokenizer, 1)) for text in ("ab", "xyz")
    ]
    answering = shape([prompts[0], prompts[0], prompts[1], prompts[1]])
    for part in [*parts(b"ab", 1), *parts(b"xyz", 1, index=2)]:
        answering.prompt(part)
    samples = [WholeSample() for _ in range(4)]
    for index, sample in enumerate(samples):
        sample.add(Delta(index, "!", finish="length"))
    choices = orjson.loads(orjson.dumps(answering.whole(samples, Usage(5, 4, 0))))["choices"]
    assert [choice["text"] for choice in choices] == ["ab!", "ab!", "xyz!", "xyz!"]
    assert choices[0]["logprobs"]["tokens"] == choices[1]["logprobs"]["tokens"] == ["a", "b"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 3, 3]
    chunks = [
        chunk
        for delta in (Delta(1), Delta(1, "!"), Delta(1, finish="length"))
        for chunk in orjson.loads(orjson.dumps(answering.chunks(delta)))
    ]
    told = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["text"], choice["logprobs"]["tokens"]) for choice in told] == [
        ("ab", ["a", "b"]),
        ("!", []),
        ("", []),
    ]


def test_an_answer_without_a_word_shows_its_prompt() -> None:
    """max_tokens 0: all there is to say comes with the end."""
    answering = shape([ShownPrompt("ab", EchoedLogprobs("ab", Tokenizer(), 1))])
    for part in parts(b"ab", 1):
        answering.prompt(part)
    [chunk] = orjson.loads(orjson.dumps(answering.chunks(Delta(0, finish="length"))))
    [choice] = chunk["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["text_offset"]) == ("ab", "length", [0, 1])


def test_chat_tells_it_beside_the_choices() -> None:
    answering = ChatShape(
        AnswerHead("id", 1, "m", Tokenizer(), None), ShownPrompt(listed=PromptLogprobs(Tokenizer(), 1))
    )
    for part in parts(b"ab", 1):
        answering.prompt(part)
    whole = orjson.loads(orjson.dumps(answering.whole([WholeSample()], Usage(2, 0, 0))))
    assert [row and sorted(row) for row in whole["prompt_logprobs"]] == [None, ["65", "98"]]
    plain = ChatShape(AnswerHead("id", 1, "m", Tokenizer(), None), ShownPrompt())
    assert "prompt_logprobs" not in plain.whole([WholeSample()], Usage(2, 0, 0))


def completion(**fields: object) -> Ask:
    return CompletionBody.parse(orjson.dumps({"model": "m", "prompt": "hello", **fields})).asks()[0]


@pytest.mark.parametrize(
    ("fields", "scored"),
    [
        ({}, None),
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
        ({"echo": True, "logprobs": 2}, 2),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 3, "logprobs": 5}, 3),
        ({"prompt_logprobs": 3, "logprobs": 5, "echo": True}, 5),
    ],
)
def test_what_is_wanted_of_the_prompt(fields: dict[str, object], scored: int | None) -> None:
    assert completion(**fields).scored == scored


def test_log_probabilities_of_prompts_are_bounded_together() -> None:
    most = RouterSettings(max_prompt_logprobs=60)
    check_scored([(completion(prompt_logprobs=2, n=2), 5), (completion(echo=True, logprobs=2), 10)], most)
    for asked, param in (({"prompt_logprobs": 2}, "prompt_logprobs"), ({"echo": True, "logprobs": 2}, "logprobs")):
        with pytest.raises(InvalidRequest, match="would have 63") as caught:
            check_scored([(completion(n=2, **asked), 5), (completion(**asked), 11)], most)
        assert caught.value.param == param
    check_scored([(completion(logprobs=20), 10**6)], most)


class Doubles(TracerTokenizer):
    """Two ids for each byte."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes((token_id % 256,))


def test_a_label_of_several_tokens_stands_for_the_one_that_was_drawn_else_for_the_likeliest() -> None:
    """Who looks for the likeliest one there, to tell whether an answer was it, must find it."""
    a, other_a, b, c = 65, 65 + 256, 66, 67
    top = [(a, -0.1), (b, -3.0), (other_a, -5.0)]
    assert likely(Doubles(), b, -3.0, top) == {"A": -0.1, "B": -3.0}
    assert likely(Doubles(), a, -0.1, top) == {"A": -0.1, "B": -3.0}
    assert likely(Doubles(), other_a, -5.0, top) == {"A": -5.0, "B": -3.0}
    assert list(likely(Doubles(), c, -9.0, top)) == ["A", "B", "C"]
