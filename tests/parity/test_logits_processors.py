"""Penalties, bias and min-p against Hugging Face transformers' own logits processors, on random logits."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from engine.messages import DrawRules, SampleSpec
from engine.rules import Fold
from engine.sampler import sample_row

V, EOS = 500, 7


def ours(rules: DrawRules, history: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return Fold(rules, history, vocab_size=V, eos_ids=[EOS]).shape(logits)


def theirs(processor: LogitsProcessor, history: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = processor(torch.tensor([history]), torch.tensor(logits[None]))[0].numpy()
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_penalties_and_bias(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, V).astype(np.float32)
    history = rng.integers(0, V, 60).tolist()
    prompt = int(rng.integers(1, 60))

    penalty = float(rng.uniform(0.5, 2.0))
    repetition = RepetitionPenaltyLogitsProcessor(penalty)
    found = ours(DrawRules(prompt, repetition=penalty), history, logits)
    np.testing.assert_allclose(found, theirs(repetition, history, logits), rtol=1e-6)

    bias = {int(token): float(rng.uniform(-100, 100)) for token in rng.integers(0, V, 30)}
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    found = ours(DrawRules(prompt, bias=bias), history, logits)
    np.testing.assert_allclose(found, theirs(biased, history, logits), rtol=1e-5, atol=1e-5)

    for least in (60 - prompt, 61 - prompt):  # enough is written, and one is missing
        early = MinNewTokensLengthLogitsProcessor(prompt, least, EOS, device="cpu")
        found = ours(DrawRules(prompt, min_tokens=least), history, logits)
        np.testing.assert_array_equal(found, theirs(early, history, logits))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5])
def test_min_p_draws_from_what_the_warper_keeps(min_p: float) -> None:
    rng = np.random.default_rng(3)
    for seed in range(200):
        logits = rng.normal(0, 2, V).astype(np.float32)
        warm = theirs(TemperatureLogitsWarper(0.8), [0], logits)
        kept = np.flatnonzero(np.isfinite(theirs(MinPLogitsWarper(min_p), [0], warm)))
        spec = SampleSpec(0, seed, 0.8, 1.0, 0, -1, min_p)
        [drawn] = sample_row(logits, [spec], 5)
        # The noise is what it is for the whole vocabulary: forbidding all others must not change the draw.
        others = np.full(V, -np.inf, np.float32)
        others[kept] = logits[kept]
        [expected] = sample_row(others, [SampleSpec(0, seed, 0.8, 1.0, 0, -1)], 5)
        assert drawn.token == expected.token
