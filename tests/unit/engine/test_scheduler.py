"""Who gets a share of a step, by table; then fairness and budgets for random queues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.keys import KeyChain, root_key
from engine.scheduler import StepBudget, choose
from engine.sequence import Sequence


def sequence(number: int, tokens: int, computed: int = 0, *, arrival: float = 0.0, last_plan: int = 0) -> Sequence:
    return Sequence(
        id=number,
        tokens=[1] * tokens,
        chain=KeyChain(root_key(b"f"), 16),
        draws=[],
        arrival=arrival,
        computed=computed,
        last_plan=last_plan,
        runnable=True,
    )


def shares(sequences: list[Sequence], budget: StepBudget) -> list[tuple[int, int]]:
    return [(s.id, n) for s, n in choose(sequences, budget)]


def test_decoding_comes_first_and_readers_share_what_is_left() -> None:
    both = [sequence(1, 100), sequence(2, 50, 49)]
    assert shares(both, StepBudget(64, 8)) == [(2, 1), (1, 63)]


def test_readers_beside_streams_get_at_most_the_local_share() -> None:
    both = [sequence(1, 100), sequence(2, 50, 49)]
    assert shares(both, StepBudget(64, 8, 0.25)) == [(2, 1), (1, 16)]
    assert shares([sequence(1, 100)], StepBudget(64, 8, 0.25)) == [(1, 64)]


def test_a_short_prompt_passes_between_the_chunks_of_a_long_one() -> None:
    long, short = sequence(1, 3000, 256), sequence(2, 40)
    assert shares([long, short], StepBudget(256, 8)) == [(2, 40), (1, 216)]


def test_a_long_prompt_is_not_passed_over_for_ever() -> None:
    long = sequence(1, 1000)
    served = [1 in dict(shares([long, sequence(100 + step, 64)], StepBudget(64, 8))) for step in range(1000 // 64 + 1)]
    assert all(served), "short prompts kept the long one waiting"


def test_a_very_long_prompt_among_short_ones_takes_four_times_as_long_as_alone_at_most() -> None:
    long, steps = sequence(1, 32 * 64), 0
    while long.remaining > 64:
        steps += 1
        short = sequence(100 + steps, 64, arrival=float(steps))
        taken = dict(shares([long, short], StepBudget(64, 8)))
        assert taken[short.id] >= 48
        long.computed += taken[1]
    assert steps <= 4 * 32


@pytest.mark.parametrize(("chunk", "batch"), [(16, 16), (16, 64), (1, 1), (256, 512)])
def test_a_reader_goes_on_beside_streams_that_fill_a_chunk_alone(chunk: int, batch: int) -> None:
    streams = [sequence(i, 8, 7) for i in range(batch)]
    taken = shares([*streams, sequence(9999, 100)], StepBudget(chunk, batch, 0.5))
    assert len(taken) == batch + 1
    assert taken[-1] == (9999, max(1, chunk // 8))


def test_more_streams_than_the_batch_takes_turn_about() -> None:
    streams = [sequence(i, 10, 9, last_plan=i) for i in range(4)]
    assert [i for i, _ in shares(streams, StepBudget(64, 2))] == [0, 1]


def test_a_complete_prompt_without_its_token_is_run_again_as_one_position() -> None:
    assert shares([sequence(1, 32, 32)], StepBudget(64, 8)) == [(1, 1)]


def test_what_is_not_runnable_is_left_alone() -> None:
    waiting = sequence(1, 10)
    waiting.runnable = False
    assert shares([waiting], StepBudget(64, 8)) == []


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=12),
    st.integers(1, 128),
    st.integers(1, 8),
    st.floats(0.1, 1.0),
)
def test_budgets_hold(queue: list[tuple[int, int]], chunk: int, batch: int, share: float) -> None:
    sequences = [sequence(i, tokens, min(done, tokens)) for i, (tokens, done) in enumerate(queue)]
    chosen = choose(sequences, StepBudget(chunk, batch, share))
    assert len({s.id for s, _ in chosen}) == len(chosen)
    decoding = [s for s, _ in chosen if s.decoding]
    reading = sum(n for s, n in chosen if not s.decoding)
    assert len(decoding) <= batch
    assert reading <= max(1, chunk // 8, chunk - len(decoding))
    readers = [s for s in sequences if not s.decoding]
    assert not readers or min(readers, key=lambda s: s.id) in [s for s, _ in chosen], "the oldest got nothing"
    assert all(1 <= n <= s.remaining for s, n in chosen)
    assert bool(chosen) == bool(sequences)
