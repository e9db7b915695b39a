"""Log-probabilities of a prompt's own tokens: what is still wanted of them, and a row's share of it (pure).

The token at position p is judged by the logits of position p - 1; the first of a prompt by none. So a position whose KV
came from a cache has nothing to say about the token after it: reading begins, at the latest, at the position before
the first token that is still wanted, and a prefix hit covers no more than what lies before that.
"""

from dataclasses import dataclass

from cluster.core.errors import IntegrityError
from engine.messages import Score


@dataclass(slots=True)
class Scoring:
    """The tokens at positions [next, end) are wanted, each beside the `top` most likely ones."""

    top: int
    next: int
    end: int

    @property
    def done(self) -> bool:
        return self.next >= self.end

    def share(self, start: int, tokens: list[int], computed: int) -> Score | None:
        """What a row owes that computes positions [start, computed) of `tokens`; None when it owes nothing.

        Raises IntegrityError for a row that begins too late: what is wanted before it would never come.
        """
        if self.done:
            return None
        if start >= self.next:
            raise IntegrityError(f"a row from {start} cannot tell of the token at {self.next}")
        last = min(self.end, computed + 1)
        return Score(self.top, self.next - 1 - start, tokens[self.next : last]) if last > self.next else None


def usable_blocks(positions: int, block_size: int, scoring: Scoring | None) -> int:
    """How many of a sequence's blocks may be prefix hits: its last position is computed, and so is what is wanted."""
    most = positions - 1
    if scoring is not None and not scoring.done:
        most = min(most, scoring.next - 1)
    return max(0, most) // block_size
