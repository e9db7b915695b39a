"""The default model, greedy in float32: every one of 60 tokens after every prompt is what transformers ranks first."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.models.pull import pull
from cluster.models.registry import DEFAULT_MODEL
from cluster.models.store import default_cache
from tests.checkpoints import reference_logits, reference_model
from tests.unit.model.harness import PagedRun, Sequence, load

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water",
    "Once upon a time there was a miller who lived beside a river. Every morning he opened the headrace, and the "
    "water ran down the channel to the wheel. One day the river was low, and the miller said to his daughter:",
)
NEW_TOKENS = 60
CHUNK = 32
# Two float32 implementations differ by about 1e-5 in a logit; a margin below this decides nothing.
EPSILON = 1e-3


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(DEFAULT_MODEL, default_cache())


def test_greedy_tokens_are_the_argmax_of_transformers(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    run = PagedRun(load(folder))
    sequences = [Sequence(list(tokenizer.encode(prompt).ids)) for prompt in PROMPTS]
    prompt_lengths = [len(s.tokens) for s in sequences]
    for s in sequences:
        s.tokens.append(int(run.feed(s, CHUNK)[-1][1].argmax()))
    for _ in range(NEW_TOKENS - 1):
        logits = run.model.run([run.row(s, 1) for s in sequences])
        for s, best in zip(sequences, logits.argmax(axis=1), strict=True):
            s.tokens.append(int(best))

    judge, close_calls = reference_model(folder), 0
    for s, length in zip(sequences, prompt_lengths, strict=True):
        expected = reference_logits(judge, s.tokens)[length - 1 : -1].numpy()
        assert len(expected) == NEW_TOKENS
        chosen = np.take_along_axis(expected, np.array(s.tokens[length:])[:, None], axis=1)[:, 0]
        behind = expected.max(axis=1) - chosen
        assert behind.max() < EPSILON, f"{tokenizer.decode(s.tokens)!r}: token {int(behind.argmax())} is not the best"
        close_calls += int((behind > 0).sum())
    assert close_calls <= 1
    assert "Paris" in tokenizer.decode(sequences[0].tokens)
