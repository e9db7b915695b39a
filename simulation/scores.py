"""What a prompt's log-probabilities must be, by plain arithmetic over the tracer's reference logits (I5)."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cluster.scores import Scores
from engine.messages import TracerModel
from engine.model.tracer import reference_logprobs
from simulation.site import Violation

_EPSILON = 1e-4


def judge_scores(scores: Scores, prompt: tuple[int, ...], model: TracerModel, following: int, name: str) -> int:
    """Scores from the prompt's token `following` on. Returns which one is next. Raises Violation for wrong ones."""
    if scores.start != following:
        raise Violation(f"I4: {name} hears of its prompt from {scores.start} on, {following} is next")
    if scores.end > len(prompt):
        raise Violation(f"I4: {name} hears of {scores.end} tokens of {len(prompt)}")
    right = _logprobs(prompt, model)
    for at in range(scores.start, scores.end):
        row = right[at - 1]
        told, own = float(scores.logprobs[at - scores.start, 0]), float(row[prompt[at]])
        if not abs(told - own) <= _EPSILON:
            raise Violation(f"I5: {name} hears {told} of token {at} of its prompt, right is {own}")
        before = np.count_nonzero(row > own) + np.count_nonzero(row[: prompt[at]] == own)
        if scores.ranks[at - scores.start] != 1 + before:
            raise Violation(f"I5: {name} hears rank {scores.ranks[at - scores.start]} of token {at}, not {1 + before}")
    return scores.end


@lru_cache(maxsize=256)
def _logprobs(prompt: tuple[int, ...], model: TracerModel) -> NDArray[np.float64]:
    return reference_logprobs(list(prompt), model)
