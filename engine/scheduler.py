"""Which sequences get a share of the next step (pure).

1. Every decoding sequence takes one position, least recently run first, up to `max_batch`.
2. What is left of `chunk_tokens` goes to sequences that still read: at least a quarter of it to the one that came
   first, so everybody's turn comes, however many short prompts keep coming; the rest by the fewest positions left,
   so short prompts pass between the chunks of a long one. While sequences decode, readers get at most `local_share`
   of the chunk, but an eighth of it also where the streams alone are as many as that.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Bounds of one step."""

    chunk_tokens: int
    max_batch: int
    local_share: float = 1.0

    @property
    def least_tokens(self) -> int:
        """What readers may take of a step that streams alone would fill."""
        return max(1, self.chunk_tokens // 8)

    @property
    def local_tokens(self) -> int:
        """What readers may take of a step while sequences decode."""
        return max(1, int(self.chunk_tokens * self.local_share))


def choose(sequences: Iterable[Sequence], budget: StepBudget) -> list[tuple[Sequence, int]]:
    """Sequences of the next step with the number of positions each may compute, decoding ones first."""
    runnable = [s for s in sequences if s.runnable]
    decoding = sorted((s for s in runnable if s.decoding), key=lambda s: (s.last_plan, s.arrival, s.id))
    chosen = [(s, 1) for s in decoding[: budget.max_batch]]
    readers = sorted((s for s in runnable if not s.decoding), key=lambda s: (s.remaining, s.arrival, s.id))
    if not readers:
        return chosen
    left = max(budget.chunk_tokens - len(chosen), budget.least_tokens)
    if chosen:
        left = min(left, budget.local_tokens)
    oldest = min(readers, key=lambda s: (s.arrival, s.id))
    kept = min(oldest.remaining, -(-left // 4))  # for the oldest, until it has its share
    for sequence in readers:
        if sequence is oldest:
            kept = 0
        share = min(left - kept, sequence.remaining)
        if share > 0:
            chosen.append((sequence, share))
            left -= share
    return chosen
