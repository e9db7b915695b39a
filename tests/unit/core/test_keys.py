"""Block keys: stable over processes, distinct for every field, and dependent on the whole prefix."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.keys import KeyChain, child_key, root_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def test_a_key_never_changes_between_versions_of_this_code() -> None:
    assert child_key(root_key(b"weights", salt=b"tenant"), list(range(16))).hex() == "7b63c48da8f6e55a8ef1733bad81bcd6"


@given(TOKENS, st.integers(1, 8), st.integers(0, 60))
def test_growing_step_by_step_equals_all_at_once(tokens: list[int], block_size: int, cut: int) -> None:
    grown, whole = (KeyChain(root_key(b"f"), block_size) for _ in range(2))
    grown.extend(tokens[:cut])
    assert grown.extend(tokens) == whole.extend(tokens)
    assert len(whole.keys) == len(tokens) // block_size


@given(TOKENS.filter(bool), st.data())
def test_one_other_token_changes_every_key_from_there_on(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] += 1
    first, second = (KeyChain(root_key(b"f"), 4).extend(t) for t in (tokens, other))
    assert first[: at // 4] == second[: at // 4]
    assert all(a != b for a, b in zip(first[at // 4 :], second[at // 4 :], strict=True))


def test_fields_cannot_be_confused() -> None:
    roots = {
        root_key(b"f"),
        root_key(b"f", adapter="x"),
        root_key(b"f", salt=b"x"),
        root_key(b"fx"),
        root_key(b"", adapter="f", salt=b"x"),
        root_key(b"", adapter="fx"),
    }
    assert len(roots) == 6
