"""The text fold: the same answer for every grouping of tokens, cut where the first end holds."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.front.text import SampleText
from router.front.tokenizer import TracerTokenizer
from router.front.tools.folds import CallFold, HermesCalls, JsonCalls
from router.requests import EndReason, TokenLogprob
from tests.unit.router_front.fold_tools import EOS, fold, groups, rules

UNICODE = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
# Bytes of any text, broken characters, tokens with text of their own, and the ends, all mixed.
IDS = st.lists(
    st.one_of(
        UNICODE.map(lambda text: list(text.encode())),
        st.lists(st.integers(0, 300), max_size=5),
        st.sampled_from([[EOS], [77], []]),
    ),
    max_size=8,
).map(lambda parts: [i for part in parts for i in part])
STOPS = st.lists(st.one_of(st.text(alphabet="<25>ab�é", min_size=1, max_size=3), UNICODE.filter(bool)), max_size=3)
PLACES = st.lists(st.integers(0, 200), max_size=10)


@given(IDS, STOPS, PLACES, st.integers(1, 40))
def test_any_grouping_gives_the_same_answer(ids: list[int], stops: list[str], places: list[int], most: int) -> None:
    how = rules(stops=stops, end_ids=[EOS, 77], max_tokens=most)
    whole = fold(how, [ids])
    assert fold(how, groups(ids, places)) == whole
    assert fold(how, [*[[i] for i in ids], []]) == whole
    whole.text.encode()  # valid Unicode


@given(IDS, STOPS, PLACES, st.integers(1, 40))
def test_ends_at_the_first_offset_where_any_end_holds(
    ids: list[int], stops: list[str], places: list[int], most: int
) -> None:
    how = rules(stops=stops, end_ids=[EOS, 77], max_tokens=most)
    got = fold(how, groups(ids, places))
    ends = [at for at, i in enumerate(ids) if i in (EOS, 77)] + [most - 1, len(ids) - 1]
    first_without_stops = min(ends) + 1
    assert got.completion_tokens <= first_without_stops
    if not stops:
        assert got.completion_tokens == first_without_stops
    assert got.ids == tuple(ids[: got.completion_tokens])
    assert got.seen_tokens == len(ids)
    shown_stops = [stop for stop in stops if stop in got.text]
    assert not shown_stops


@given(UNICODE, PLACES)
def test_text_comes_back_exactly(text: str, places: list[int]) -> None:
    got = fold(rules(), groups([*text.encode(), EOS], places), "eos")
    assert got.text == text
    assert got.finish == "stop"
    assert got.completion_tokens == len(text.encode()) + 1


@given(IDS, PLACES)
def test_logprob_bytes_join_to_the_text_and_offsets_never_fall(ids: list[int], places: list[int]) -> None:
    got = fold(rules(end_ids=[EOS, 77]), groups(ids, places))
    assert [entry.token_id for entry in got.entries] == list(got.ids)
    joined = b"".join(entry.bytes or b"" for entry in got.entries if entry.shown)
    assert joined.decode(errors="replace") == got.text
    offsets = [entry.offset for entry in got.entries]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(got.text) for offset in offsets)
    assert [entry.logprob.logprob for entry in got.entries] == [-float(i) for i in got.ids]


@given(UNICODE.filter(bool))
def test_a_cut_in_mid_character_ends_the_same_in_stream_and_whole(text: str) -> None:
    ids = list(text.encode())
    for most in range(1, len(ids) + 1):
        expected = bytes(ids[:most]).decode(errors="replace")
        assert fold(rules(max_tokens=most), [[i] for i in ids]).text == expected
        assert fold(rules(max_tokens=most), [ids]).text == expected


def test_no_replacement_mark_shows_while_a_character_is_incomplete() -> None:
    sample = SampleText(0, rules())
    shown = [sample.feed([byte]).text for byte in "🌶".encode()]
    assert shown == ["", "", "", "🌶"]


def test_text_without_a_stop_in_sight_is_not_held_back() -> None:
    sample = SampleText(0, rules(stops=["DEFGHIJ"]))
    assert sample.feed(b"ABC").text == "ABC"
    assert sample.feed(b"DEF").text == ""
    assert sample.feed(b"X").text == "DEFX"


def test_max_tokens_one_with_the_first_token_a_stop_is_a_stop() -> None:
    got = fold(rules(stops=["A"], max_tokens=1), [b"A"], "length")
    assert (got.text, got.finish, got.completion_tokens) == ("", "stop", 1)


def test_max_tokens_one() -> None:
    got = fold(rules(max_tokens=1), [b"ABC"], "length")
    assert (got.text, got.finish, got.ids, got.seen_tokens) == ("A", "length", (ord("A"),), 3)


def test_end_of_sequence_that_is_no_end_is_counted_without_ending() -> None:
    got = fold(rules(end_ids=[], max_tokens=8), [[EOS] * 8], "length")
    assert (got.finish, got.completion_tokens) == ("length", 8)


def test_a_stop_token_ends_without_its_text() -> None:
    got = fold(rules(end_ids=[EOS, ord("C")]), [b"ABCD"])
    assert (got.text, got.finish, got.completion_tokens) == ("AB", "stop", 3)
    assert [entry.shown for entry in got.entries] == [True, True, False]


@pytest.mark.parametrize("places", [[], [1], [2], [3], [1, 2, 3, 4, 5, 6]])
def test_a_stop_string_within_the_first_min_tokens_is_text_and_the_next_one_is_the_end(places: list[int]) -> None:
    parts = groups(b"ABxABxABx", places)
    assert fold(rules(stops=["AB"], min_tokens=1), parts).text == ""
    got = fold(rules(stops=["AB"], min_tokens=2), parts)
    assert (got.text, got.finish, got.completion_tokens) == ("ABx", "stop", 5)
    assert fold(rules(stops=["AB"], min_tokens=5), parts).text == "ABxABx"
    assert fold(rules(stops=["AB"], min_tokens=9), parts).text == "ABxABxABx"


def test_entries_cut_off_by_a_stop_string_are_marked() -> None:
    got = fold(rules(stops=["CD"]), [[i] for i in b"ABCDE"])
    assert [(chr(e.token_id), e.shown, e.offset) for e in got.entries] == [
        ("A", True, 0),
        ("B", True, 1),
        ("C", False, 2),
        ("D", False, 2),
    ]


def test_an_end_may_come_with_no_ids() -> None:
    sample = SampleText(0, rules(stops=["xyz"]))
    assert sample.feed(b"ax").text == "a"
    last = sample.feed([], end="length")
    assert (last.text, last.finish) == ("x", "length")


def test_nothing_is_taken_after_the_end() -> None:
    sample = SampleText(0, rules(stops=["b"]))
    sample.feed(b"ab")
    late = sample.feed(b"cd", [TokenLogprob(0.0)] * 2, "eos")
    assert (late.text, late.ids, late.entries, late.finish) == ("", (), (), None)
    assert (sample.finish, sample.completion_tokens, sample.dropped_tokens) == ("stop", 2, 2)


class _CountingTokenizer(TracerTokenizer):
    """Counts how often a token is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def token_bytes(self, token_id: int) -> bytes | None:
        self.looks += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("tokens", [1_000, 10_000])
def test_each_token_is_decoded_once(tokens: int) -> None:
    tokenizer = _CountingTokenizer()
    sample = SampleText(0, rules(tokenizer=tokenizer, stops=["b"]))
    for _ in range(tokens):
        sample.feed(b"a")
    assert tokenizer.looks == tokens


CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
SAID = st.lists(st.sampled_from([CALL, CALL[:20], CALL[20:], "a ", "é🌶", "\n", "<", "</tool_call>"]), max_size=6)
HOW = st.sampled_from([HermesCalls, lambda: HermesCalls(parallel=False), lambda: JsonCalls(frozenset({"f"}))])


@given(SAID, STOPS, PLACES, st.integers(1, 200), HOW)
def test_any_grouping_gives_the_same_calls(
    said: list[str], stops: list[str], places: list[int], most: int, calls: Callable[[], CallFold]
) -> None:
    ids = [*"".join(said).encode(), EOS]
    how = rules(stops=stops, max_tokens=most, calls=calls)
    whole = fold(how, [ids])
    assert fold(how, groups(ids, places)) == whole
    assert fold(how, [[i] for i in ids]) == whole
    assert not (whole.finish == "tool_calls" and not whole.calls)
    joined = b"".join(entry.bytes or b"" for entry in whole.entries if entry.token_id != EOS)
    assert joined == bytes(i for i in whole.ids if i != EOS)


def test_a_call_ends_with_its_own_reason_and_a_cut_one_with_length() -> None:
    def ended(text: str, most: int = 1000, end: EndReason = "eos") -> tuple[str, list[tuple[str, str]], str | None]:
        got = fold(rules(max_tokens=most, calls=HermesCalls), [text.encode()], end)
        return got.text, got.calls, got.finish

    assert ended("I look." + CALL) == ("I look.", [("f", '{"a": "é"}')], "tool_calls")
    assert ended(CALL, most=45) == ("", [("f", '{"a": "')], "length")
    assert ended(CALL[:45]) == ("", [("f", '{"a": "')], "stop")  # the model itself broke off
    assert ended(CALL, end="length") == ("", [("f", '{"a": "é"}')], "length")
    assert ended("no call") == ("no call", [], "stop")


def test_where_one_call_is_wanted_its_last_brace_ends_the_sample() -> None:
    got = fold(rules(calls=lambda: HermesCalls(parallel=False)), [[i] for i in (CALL + CALL).encode()])
    assert (got.calls, got.finish) == ([("f", '{"a": "é"}')], "tool_calls")
    assert got.completion_tokens == len(CALL[: CALL.index("</")].encode())


@given(IDS, st.lists(st.text(alphabet="ab<2", min_size=1, max_size=3), max_size=3), PLACES)
def test_a_stop_string_that_is_shown_ends_the_text(ids: list[int], stops: list[str], places: list[int]) -> None:
    plain, shown = fold(rules(stops=stops), [ids]), fold(rules(stops=stops, show_stop=True), groups(ids, places))
    assert (shown.ids, shown.completion_tokens) == (plain.ids, plain.completion_tokens)
    assert shown.text == plain.text or shown.text in {plain.text + stop for stop in stops}


class _SpecialTokenizer(TracerTokenizer):
    """The end token has a name and no text."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return None if token_id in (EOS, 1022) else super().token_bytes(token_id)

    def label(self, token_id: int) -> str:
        return {EOS: "<end>", 1022: "<pad>"}.get(token_id) or super().label(token_id)


@pytest.mark.parametrize(
    ("special", "text"),
    [(False, "ab"), (True, "a<pad>b")],
)
def test_special_tokens_are_shown_to_those_who_ask(special: bool, text: str) -> None:
    how = rules(tokenizer=_SpecialTokenizer(), special=special)
    assert fold(how, [[97, 1022, 98, EOS]]).text == text
