"""What fits: the prompt and n answers in the pool, prompt + max_tokens in the context (FAULTS C30)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest, ModelNotFound
from router.front.ask import Ask, Spelling, TokenPrompt
from router.front.bounds import MAX_LOGIT_BIAS, check_model, check_parameters, fit, sampling
from router.requests import Limits

LIMITS = Limits(max_context=100, pool_tokens=1000, block_size=10, vocab_size=50, eos_ids=())


def ask(**fields: object) -> Ask:
    base = Ask(
        model="m", prompt=TokenPrompt(()), spelling=Spelling(prompt="messages", max_tokens="max_completion_tokens")
    )
    return base._replace(**fields)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("fields", "most"), [({"max_tokens": 5}, 5), ({}, 90)])
def test_min_tokens_within_max_tokens_whoever_chose_it(fields: dict[str, int], most: int) -> None:
    assert fit(ask(min_tokens=most, **fields), [0] * 10, LIMITS).max_tokens == most
    with pytest.raises(InvalidRequest, match=f"at most {most}") as caught:
        fit(ask(min_tokens=most + 1, **fields), [0] * 10, LIMITS)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("bad", [-1, 50])
def test_a_bias_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fit(ask(logit_bias=((1, 1.0), (bad, 1.0))), [1], LIMITS)
    assert caught.value.param == "logit_bias"


NAN, INFINITE = float("nan"), float("inf")
RULES: dict[str, list[object]] = {
    "presence_penalty": [-2.01, 2.01, NAN, INFINITE],
    "frequency_penalty": [-2.01, 2.01, NAN, -INFINITE],
    "repetition_penalty": [0.0, -0.1, 100.1, NAN, INFINITE],
    "min_p": [-0.01, 1.01, NAN],
    "min_tokens": [-1, 2**31],
    "logit_bias": [((1, 100.5),), ((1, NAN),), ((1, -INFINITE),), tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1))],
}


@pytest.mark.parametrize(("param", "value"), [(param, value) for param, values in RULES.items() for value in values])
def test_rules_out_of_bounds_are_refused_by_name(param: str, value: object) -> None:
    """gRPC can send what JSON cannot: NaN and infinity."""
    with pytest.raises(InvalidRequest) as caught:
        check_parameters(ask(prompt=TokenPrompt((1,)), **{param: value}), RouterSettings())
    assert caught.value.param == param


def test_rules_that_are_not_given_are_off() -> None:
    how = sampling(ask(), LIMITS)
    assert (how.presence_penalty, how.frequency_penalty, how.min_p, how.min_tokens, how.logit_bias) == (0, 0, 0, 0, ())
    assert how.repetition_penalty == 1
    asked = sampling(ask(repetition_penalty=1.5, min_tokens=3, logit_bias=((1, -100.0),)), LIMITS)
    assert (asked.repetition_penalty, asked.min_tokens, asked.logit_bias) == (1.5, 3, ((1, -100.0),))


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        check_model("x" * 10_000, "m")
    assert len(caught.value.message) < 200
