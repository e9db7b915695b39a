"""Stop strings: exactly the longest tail that begins a stop string is held back, whatever the chunks (FAULTS C20)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.front.stops import StopScan, StopStrings

LETTERS = st.text(alphabet="abé🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule by brute force: the first character that completes a stop string decides, the longest one there."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def must_hold(text: str, stops: list[str]) -> int:
    """The longest tail of `text` that could still become a stop string."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


def cut(text: str, places: list[int]) -> list[str]:
    """`text` in pieces, empty ones included."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=6))
def test_matches_the_reference_for_any_chunks_and_holds_back_no_more_than_needed(
    text: str, stops: list[str], places: list[int]
) -> None:
    scan, shown, fed = StopScan(StopStrings(stops)), "", ""
    matched = False
    for piece in cut(text, places):
        certain, matched = scan.feed(piece)
        shown, fed = shown + certain, fed + piece
        if matched:
            break
        assert shown == fed[: len(fed) - must_hold(fed, stops)]
    if not matched:
        shown += scan.finish()
    assert (shown, matched) == reference(text, stops)


@pytest.mark.parametrize(
    ("chunks", "stops", "shown"),
    [
        (["ABC", "DEF", "GHIJ", "KL"], ["DEFGHIJ"], "ABC"),
        (["a", "b", "c"], ["b"], "a"),
        (["你", "好", "吗"], ["好吗"], "你"),
        (["xxfoo", "ba"], ["foobar", "foobaz", "foo!", "fooba"], "xx"),
        (["xx", "y"], ["xy"], "x"),
        (["abcd"], ["bc", "abcd"], "a"),
    ],
)
def test_cases_from_the_field(chunks: list[str], stops: list[str], shown: str) -> None:
    scan, text = StopScan(StopStrings(stops)), ""
    for chunk in chunks:
        certain, matched = scan.feed(chunk)
        text += certain
        if matched:
            break
    assert matched
    assert text == shown


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
