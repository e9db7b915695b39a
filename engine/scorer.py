"""Log-probabilities of prompt tokens, from logits that come in pieces: only one piece is ever in memory.

They are those of the raw model, as sampler.py defines them: the same token has the same log-probability, to the bit,
whether it was drawn or stood in a prompt. Shapes: N rows of a piece, R rows of a Score, K its `top`, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.messages import Score, Scored
from engine.sampler import score_row


class _Rows:
    """The rows of one Score, as they fill."""

    def __init__(self, wanted: Score) -> None:
        rows = len(wanted.targets)
        self.wanted = wanted
        self.filled = 0
        self.logprobs = np.empty((rows, 1 + wanted.top), "<f4")
        self.ids = np.empty((rows, wanted.top), "<i4")
        self.ranks = np.empty(rows, "<i4")

    @property
    def full(self) -> bool:
        return self.filled == len(self.wanted.targets)

    def add(self, logits_V: NDArray[np.float32]) -> None:
        at, target = self.filled, self.wanted.targets[self.filled]
        own, top_K, ids_K, self.ranks[at] = score_row(logits_V, target, self.wanted.top)
        self.logprobs[at, 0], self.logprobs[at, 1:], self.ids[at] = own, top_K, ids_K
        self.filled += 1

    def result(self) -> Scored:
        return Scored(self.wanted.top, self.logprobs.tobytes(), self.ids.tobytes(), self.ranks.tobytes())


class Scorer:
    """Takes the logits of every wanted position of one forward, in order, and keeps what was asked of them."""

    def __init__(self, wanted: Sequence[Score]) -> None:
        self._rows = [_Rows(score) for score in wanted]
        self._at = 0

    def take(self, logits_NV: NDArray[np.float32]) -> None:
        """The next piece. Raises ValueError for logits that are not finite at their maximum."""
        for logits_V in logits_NV:
            rows = self._rows[self._at]
            rows.add(logits_V)
            self._at += rows.full

    def results(self) -> list[Scored]:
        """One for each Score, in order; all pieces have come."""
        return [rows.result() for rows in self._rows]
