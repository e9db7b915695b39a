"""Which sequences get a share of the next step (pure).

1. Every decoding sequence takes one position, least recently run first, up to `max_batch`.
2. What is left of `chunk_tokens` goes to sequences that still read: the one with the fewest positions left first,
   so short prompts pass between the chunks of a long one; each step without a share counts as `chunk_tokens`
   positions less, so nobody waits for ever. While sequences decode, readers get at most `local_share` of the chunk.
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
    def local_tokens(self) -> int:
        """What readers may take of a step while sequences decode."""
        return max(1, int(self.chunk_tokens * self.local_share))


def choose(sequences: Iterable[Sequence], budget: StepBudget) -> list[tuple[Sequence, int]]:
    """Sequences of the next step with the number of positions each may compute, decoding ones first."""
    runnable = [s for s in sequences if s.runnable]
    decoding = sorted((s for s in runnable if s.decoding), key=lambda s: (s.last_plan, s.arrival, s.id))
    chosen = [(s, 1) for s in decoding[: budget.max_batch]]
    left = budget.chunk_tokens - len(chosen)
    if chosen:
        left = min(left, budget.local_tokens)
    readers = sorted(
        (s for s in runnable if not s.decoding),
        key=lambda s: (s.remaining - s.passed_over * budget.chunk_tokens, s.arrival, s.id),
    )
    for sequence in readers:
        if left <= 0:
            sequence.passed_over += 1
            continue
        share = min(left, sequence.remaining)
        chosen.append((sequence, share))
        sequence.passed_over = 0
        left -= share
    return chosen
