"""What the engine asks of a model: run ragged rows against a paged pool in one forward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.layout import KVLayout


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One sequence's part of a forward: `tokens` at positions start, start+1, ... with its whole block table.

    `write` False: K and V of these positions are already in the pool and must not be written.
    `logits`: whether the logits of the last position are returned. `scored`: those of which of its tokens are told
    to `OnLogits`.
    """

    tokens: list[int]
    start: int
    table: list[int]
    write: bool
    logits: bool
    scored: range = range(0)


OnLogits = Callable[[NDArray[np.float32]], None]
"""Told the logits [n, V] of every scored position, row after row, at most SCORED_AT_ONCE at a time. Theirs during the
call alone: all of them at once would be a gigabyte for 2,048 positions and 128,000 tokens."""
SCORED_AT_ONCE = 64


def scored_pieces(rows: Sequence[ForwardRow]) -> Iterator[NDArray[np.int64]]:
    """Which of the step's tokens, laid end to end, are scored: pieces of at most SCORED_AT_ONCE."""
    if not any(row.scored for row in rows):
        return
    firsts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    tokens = np.concatenate([first + np.array(row.scored, np.int64) for first, row in zip(firsts, rows, strict=False)])
    for start in range(0, len(tokens), SCORED_AT_ONCE):
        yield tokens[start : start + SCORED_AT_ONCE]


def ignore_logits(_: NDArray[np.float32]) -> None:
    """For forwards that score nothing."""


def check_tokens(rows: Sequence[ForwardRow], vocab_size: int, max_context: int) -> None:
    """Raises ModelError for a row with a token or a position that the model does not have."""
    for index, row in enumerate(rows):
        if row.tokens and (min(row.tokens) < 0 or max(row.tokens) >= vocab_size):
            raise ModelError(f"row {index}: a token id outside of 0..{vocab_size - 1}")
        if (end := row.start + len(row.tokens)) > max_context:
            raise ModelError(f"row {index}: position {end - 1} is beyond the context of {max_context}")


class Model(Protocol):
    """A decoder with its weights loaded."""

    layout: KVLayout
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    fingerprint: bytes
    device: str  # "cpu", or torch's name of the GPU that it runs on

    def bind(self, pool: NDArray[np.uint8]) -> None:
        """Use `pool`, raw bytes of shape [num_blocks, block_bytes], for KV from now on."""

    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        """One forward for all rows. Returns logits [number of rows with `logits`, vocab_size], in row order."""
