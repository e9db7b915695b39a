"""What fits: the prompt and n answers in the pool, prompt + max_tokens in the context (FAULTS C30)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import InvalidRequest, ModelNotFound
from router.front.ask import Ask, Spelling, TokenPrompt
from router.front.bounds import check_model, fit, sampling
from router.requests import Limits

LIMITS = Limits(max_context=100, pool_tokens=1000, block_size=10, vocab_size=50, eos_ids=())


def ask(**fields: object) -> Ask:
    base = Ask(
        model="m", prompt=TokenPrompt(()), spelling=Spelling(prompt="messages", max_tokens="max_completion_tokens")
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


@given(
    prompt=st.integers(1, 60),
    n=st.integers(1, 4),
    context=st.integers(1, 80),
    pool_blocks=st.integers(1, 12),
    size=st.integers(1, 16),
)
def test_an_omitted_max_tokens_is_the_most_that_fits(
    prompt: int, n: int, context: int, pool_blocks: int, size: int
) -> None:
    limits = replace(LIMITS, max_context=context, pool_tokens=pool_blocks * size, block_size=size)

    def fits(most: int) -> bool:
        shared = prompt // size  # full blocks of the prompt; each answer has the rest of it for itself
        needed = shared + n * (blocks(prompt + most, size) - shared)
        return prompt + most <= context and needed <= pool_blocks

    most = max((m for m in range(1, context + 1) if fits(m)), default=0)
    if most == 0:
        with pytest.raises(InvalidRequest, match=r"fit") as caught:
            fit(ask(n=n), [1] * prompt, limits)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
        return
    assert fit(ask(n=n), [1] * prompt, limits).max_tokens == most
    assert fit(ask(n=n, max_tokens=most), [1] * prompt, limits).max_tokens == most
    with pytest.raises(InvalidRequest) as caught:
        fit(ask(n=n, max_tokens=most + 1), [1] * prompt, limits)
    assert (caught.value.param, caught.value.code) == ("max_completion_tokens", "context_length_exceeded")


@pytest.mark.parametrize(("length", "most"), [(98, 2), (99, 1)])
def test_the_last_prompts_that_fit_the_context(length: int, most: int) -> None:
    assert fit(ask(), [0] * length, LIMITS).max_tokens == most
    assert fit(ask(max_tokens=1), [0] * length, LIMITS).max_tokens == 1


@pytest.mark.parametrize("length", [100, 101, 10_000])
def test_a_prompt_over_the_context(length: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fit(ask(), [0] * length, LIMITS)
    assert caught.value.code == "context_length_exceeded"


def test_a_long_list_of_bad_ids_is_refused_for_its_length_first() -> None:
    with pytest.raises(InvalidRequest, match="context"):
        fit(ask(), [-1] * 10_000, LIMITS)


@pytest.mark.parametrize("bad", [-1, 50, 2**63])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(InvalidRequest, match="0 to 49"):
        fit(ask(), [1, bad], LIMITS)


def test_a_prompt_that_became_no_tokens() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        fit(ask(), [], LIMITS)


def test_a_seed_is_any_64_bits_and_drawn_when_missing() -> None:
    assert sampling(ask(seed=-1), LIMITS).seed == 2**64 - 1
    assert sampling(ask(seed=0), LIMITS).seed == 0
    assert sampling(ask(), LIMITS).seed != sampling(ask(), LIMITS).seed


@pytest.mark.parametrize(("given_k", "used"), [(None, 0), (-1, 0), (0, 0), (1, 1), (49, 49), (50, 0), (2**31 - 1, 0)])
def test_top_k_of_the_whole_vocabulary_is_off(given_k: int | None, used: int) -> None:
    assert sampling(ask(top_k=given_k), LIMITS).top_k == used


def test_greedy_and_defaults() -> None:
    assert sampling(ask(temperature=0), LIMITS).temperature == 0.0
    assert (sampling(ask(), LIMITS).temperature, sampling(ask(), LIMITS).top_p) == (1.0, 1.0)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        check_model("x" * 10_000, "m")
    assert len(caught.value.message) < 200
