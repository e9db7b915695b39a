"""The judge itself: it must see what is wrong, excuse only what wavers, and draw as the product's sampler draws."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.messages import SampleSpec
from engine.sampler import sample_row
from tests.parity.judge import EPSILON, GREEDY, Ledger

VOCAB = 8
SEEDED = SampleSpec(index=1, seed=5, temperature=0.7, top_p=0.9, top_k=5, logprobs=-1)


def _counting(ids: torch.Tensor, *, logits_to_keep: int, use_cache: bool) -> SimpleNamespace:
    """After token t the best one is t + 1; after 5 and 6 token 0 is as good as that, to half of EPSILON."""
    assert not use_cache
    logits = torch.zeros(*ids.shape, VOCAB)
    logits.scatter_(2, ((ids + 1) % VOCAB)[..., None], 1.0)
    logits[..., 0] = torch.where((ids == 5) | (ids == 6), 1 - EPSILON / 2, logits[..., 0])
    return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(cast("PreTrainedModel", _counting), batch_positions=16)


def test_what_the_reference_ranks_first_is_right(ledger: Ledger) -> None:
    ledger.add([1], GREEDY, [2, 3, 4], "short")
    ledger.add([1, 2, 3, 4, 5, 6], GREEDY, [7], "long")
    ledger.add([1], SampleSpec(2, 99, 0.0, 1.0, 0, -1), [2, 3, 4], "another sample")
    ledger.settle()
    figures = ledger.figures
    assert (figures.streams, figures.tokens, figures.judged) == (3, 7, 4)
    assert (figures.exceptions, figures.forks, figures.close_calls, figures.findings) == (0, 0, 0, [])
    assert figures.narrow == 1  # 0 after 6
    assert figures.smallest_margin == pytest.approx(EPSILON / 2, rel=1e-3)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_wrong_token_is_named(ledger: Ledger, at: int) -> None:
    output = [2, 3, 4]
    output[at] = 7
    ledger.add([1], GREEDY, output, "this path")
    with pytest.raises(AssertionError, match=f"this path: 1 prompt tokens, .* output token {at} is 7, 1 behind"):
        ledger.settle()


def test_a_close_call_is_no_exception(ledger: Ledger) -> None:
    ledger.add([4], GREEDY, [5, 0, 1], "close")
    ledger.settle()
    assert (ledger.figures.close_calls, ledger.figures.exceptions) == (1, 0)


def test_few_exceptions_among_many_tokens_are_printed_not_fatal(ledger: Ledger) -> None:
    prompts = [[a, b] for a in range(VOCAB) for b in range(VOCAB)]
    for prompt in prompts:
        ledger.add(prompt, GREEDY, [(prompt[1] + 1 + i) % VOCAB for i in range(20)], "right")
    ledger.add([2], GREEDY, [4], "wrong")
    ledger.settle()
    assert ledger.figures.exceptions == 1
    assert len(ledger.figures.findings) == 1


def test_paths_must_not_differ_where_the_reference_is_sure(ledger: Ledger) -> None:
    """Excused as exceptions, by the share of tokens, they still are a fork."""
    for prompt in ([a, b] for a in range(VOCAB) for b in range(VOCAB)):
        ledger.add(prompt, GREEDY, [(prompt[1] + 1 + i) % VOCAB for i in range(20)], "right")
    ledger.add([1, 2], GREEDY, [3, 4, 6], "other")
    with pytest.raises(AssertionError, match=r"right and other: 2 prompt tokens, .* output token 2 is 5 or 6, 1 apart"):
        ledger.settle()


def test_paths_may_fork_where_it_wavers_but_not_often(ledger: Ledger) -> None:
    ledger.add([4], GREEDY, [5, 6], "one")
    ledger.add([4], GREEDY, [5, 0], "other")
    with pytest.raises(AssertionError, match=r"more exceptions than may be:\none and other"):
        ledger.settle()
    assert (ledger.figures.forks, ledger.figures.exceptions) == (1, 0)


def test_a_longer_stream_of_the_same_tokens_is_no_fork(ledger: Ledger) -> None:
    ledger.add([1], GREEDY, [2, 3], "short")
    ledger.add([1], GREEDY, [2, 3, 4], "long")
    ledger.settle()
    assert ledger.figures.forks == 0


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("top_k", [0, 1, 20])
def test_draws_as_the_sampler_draws(top_p: float, top_k: int) -> None:
    """The judge's own top-k, top-p and noise, and those of the product, on the same logits."""
    logits = np.random.default_rng(3).normal(0, 3, (50, 64)).astype(np.float32)

    def reference(ids: torch.Tensor, *, logits_to_keep: int, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=torch.from_numpy(logits)[-logits_to_keep:].expand(len(ids), -1, -1))

    ledger = Ledger(cast("PreTrainedModel", reference))
    for index, temperature in enumerate((0.2, 1.0, 2.5)):
        spec = SampleSpec(index, (1 << 64) - 7, temperature, top_p, top_k, -1)
        drawn = [sample_row(row, [spec], position=3 + n)[0].token for n, row in enumerate(logits)]
        ledger.add([1, 2, 3], spec, drawn, "the sampler")
    ledger.settle()
    assert (ledger.figures.judged, ledger.figures.exceptions, ledger.figures.close_calls) == (150, 0, 0)


def test_another_seed_is_seen(ledger: Ledger) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[4] = 1.0
    drawn = [sample_row(logits, [SEEDED], position=p)[0].token for p in range(100)]
    assert len(set(drawn)) > 1
    wrong = next(p for p in range(1, 100) if drawn[p] != drawn[p - 1])
    ledger.add([3] * wrong, SEEDED, [drawn[wrong - 1]], "the noise of the position before")
    with pytest.raises(AssertionError, match="the noise of the position before"):
        ledger.settle()
