"""Drives a model over a poisoned pool with scattered blocks, the way an engine does."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.messages import FolderModel
from engine.model.base import ForwardRow, Model
from engine.model.loader import load_model
from engine.model.quantise import Quantization

POISON = 0xFF  # every float of these bytes is NaN, in float32, in bfloat16 and as a scale of int8


@dataclass
class Sequence:
    """Tokens known so far, how many of them are in the pool, and where."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    done: int = 0


class PagedRun:
    """A model, its pool of NaN, and blocks handed out in random order."""

    def __init__(self, model: Model, num_blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        self.pool: NDArray[np.uint8] = np.full((num_blocks, model.layout.block_bytes), POISON, dtype=np.uint8)
        model.bind(self.pool)
        self._seed = seed
        self._free: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Poison everything and hand the blocks out anew."""
        self.pool[:] = POISON
        self._free = list(range(len(self.pool)))
        random.Random(self._seed).shuffle(self._free)

    def room(self, tokens: int) -> bool:
        """Whether blocks for so many tokens, and some more, are free."""
        return len(self._free) > tokens // self.model.layout.block_size + 2

    def row(self, sequence: Sequence, count: int, *, logits: bool = True) -> ForwardRow:
        """The sequence's next `count` tokens as a row; takes the blocks they need."""
        end = sequence.done + count
        while len(sequence.table) * self.model.layout.block_size < end:
            sequence.table.append(self._free.pop())
        tokens = sequence.tokens[sequence.done : end]
        row = ForwardRow(tokens, sequence.done, list(sequence.table), write=True, logits=logits)
        sequence.done = end
        return row

    def feed(self, sequence: Sequence, chunk: int) -> list[tuple[int, NDArray[np.float32]]]:
        """Run the rest of the sequence alone in chunks. Returns (position, logits) of each chunk's last position."""
        result = []
        while sequence.done < len(sequence.tokens):
            row = self.row(sequence, min(chunk, len(sequence.tokens) - sequence.done))
            result.append((sequence.done - 1, self.model.run([row])[0]))
        return result


def load(
    folder: Path,
    block_size: int = 16,
    dtype: str = "float32",
    kernels: Literal["auto", "native", "torch", "triton"] = "auto",
    quantization: Quantization = "none",
    kv_dtype: str = "",
) -> Model:
    spec = FolderModel(str(folder), dtype, kernels=kernels, quantization=quantization, kv_dtype=kv_dtype)
    return load_model(spec, block_size, threads=1)


def random_tokens(count: int, seed: int, vocab_size: int = 320) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)
