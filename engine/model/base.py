"""What the engine asks of a model: run ragged rows against a paged pool in one forward."""

from collections.abc import Sequence
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
    `logits`: whether the logits of the last position are wanted.
    """

    tokens: list[int]
    start: int
    table: list[int]
    write: bool
    logits: bool


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

    def bind(self, pool: NDArray[np.uint8]) -> None:
        """Use `pool`, raw bytes of shape [num_blocks, block_bytes], for KV from now on."""

    def run(self, rows: list[ForwardRow]) -> NDArray[np.float32]:
        """One forward for all rows. Returns logits [number of rows with `logits`, vocab_size], in row order."""
