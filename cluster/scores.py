"""Log-probabilities of prompt tokens on the wire (proto/common.proto): arrays, in messages of bounded size.

Shapes: R rows of a message, K the most likely tokens named in each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.stubs.common_pb2 import PromptLogprobs

MESSAGE_VALUES = 4096  # log-probabilities in one message, or one row
_BYTES = 4


@dataclass(frozen=True, slots=True)
class Scores:
    """What one message says of the prompt tokens at positions start, start + 1, ...

    `logprobs` [R, 1 + K]: of the prompt's token, then of the most likely ones, `ids` [R, K]; `ranks` [R]: from 1.
    """

    start: int
    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    ranks: NDArray[np.int32]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.ranks)

    def since(self, position: int) -> "Scores":
        """Without the rows before `position`."""
        cut = max(0, position - self.start)
        return Scores(self.start + cut, self.logprobs[cut:], self.ids[cut:], self.ranks[cut:])


def messages(attempt: str, start: int, top: int, logprobs: bytes, ids: bytes, ranks: bytes) -> Iterator[PromptLogprobs]:
    """Rows as one engine gave them (engine.messages.Scored), cut into messages."""
    rows, most = len(ranks) // _BYTES, max(1, MESSAGE_VALUES // (1 + top))
    for first in range(0, rows, most):
        last = min(first + most, rows)
        yield PromptLogprobs(
            attempt=attempt,
            start=start + first,
            top=top,
            logprobs=_rows(logprobs, first, last, 1 + top),
            ids=_rows(ids, first, last, top),
            ranks=_rows(ranks, first, last, 1),
        )


def read(message: PromptLogprobs, top: int, vocab_size: int) -> Scores:
    """Raises ValueError for what is not `top` alternatives, of so many tokens, in each of its rows."""
    rows = len(message.ranks) // _BYTES
    sizes = (len(message.ranks), len(message.logprobs), len(message.ids))
    if message.top != top or not rows or sizes != (rows * _BYTES, rows * _BYTES * (1 + top), rows * _BYTES * top):
        raise ValueError(f"{rows} rows of {message.top} alternatives in {sizes} bytes, {top} were asked for")
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(rows, 1 + top)
    ids = np.frombuffer(message.ids, "<i4").reshape(rows, top)
    ranks = np.frombuffer(message.ranks, "<i4")
    if not (logprobs <= 0).all():  # NaN is not
        raise ValueError("a log-probability is above 0, or no number")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")
    if not 1 <= int(ranks.min()) <= int(ranks.max()) <= vocab_size:
        raise ValueError(f"a rank is outside the vocabulary of {vocab_size}")
    return Scores(message.start, logprobs, ids, ranks)


def _rows(array: bytes, first: int, last: int, width: int) -> bytes:
    return array[first * width * _BYTES : last * width * _BYTES]
