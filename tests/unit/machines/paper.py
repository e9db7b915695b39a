"""An engine on paper: a block is a list of (position, token), so every row can be asked what it has read.

The next token is a hash over the whole prefix. An answer is right exactly when no row ever read a block that was lost,
stale, shifted or another's - and the row that did is named at once, not the wrong token that came of it.
"""

import hashlib
import zlib
from array import array
from collections import defaultdict
from collections.abc import Container, Sequence

from cluster.core.config import ClusterConfig
from cluster.core.protocol import PROTOCOL
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from engine.layout import KVLayout
from engine.messages import Copy, FilledBlock, Row, Sampled, Step, StepDone

B = 4
VOCABULARY = 1000
EOS = frozenset(range(40))
MAX_CONTEXT = 64
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=B, dtype="float32")

Cell = tuple[int, int] | None
Content = tuple[Cell, ...]
EMPTY: Content = (None,) * B


def draw(prefix: Sequence[int], index: int, seed: int) -> int:
    """The token that follows `prefix` in sample `index`."""
    return zlib.crc32(array("q", [*prefix, -1, index, seed])) % VOCABULARY


def answer(prompt: Sequence[int], index: int, seed: int, max_tokens: int, stops: Container[int] = ()) -> list[int]:
    """The whole of one sample: until an end-of-sequence or stop token, or as long as it may be."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(draw(tokens, index, seed))
        if tokens[-1] in EOS or tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def digest_of(content: Content) -> bytes:
    return hashlib.blake2b(repr(content).encode(), digest_size=8).digest()


def contents(tokens: Sequence[int]) -> list[Content]:
    """What the full blocks of `tokens` hold."""
    cells = list(enumerate(tokens))
    return [tuple(cells[at : at + B]) for at in range(0, len(cells) // B * B, B)]


def identity(name: str, role: str, epoch: int = 1) -> WorkerIdentity:
    layout = Layout(layers=1, kv_heads=1, head_dim=4, block_size=B, dtype="float32")
    return WorkerIdentity(
        worker=name, epoch=epoch, role=role, address=name, layout=layout, fingerprint=b"weights", protocol=PROTOCOL
    )


def config(blocks: int, **handoff: float) -> ClusterConfig:
    """Small pools, short chunks, slots of two blocks."""
    engine = {"block_size": B, "pool_tokens": blocks * B, "chunk_tokens": 6, "max_batch": 3, "poison": True}
    return ClusterConfig.model_validate(
        {"model": "tracer", "engine": engine, "handoff": {"slots": 4, "slot_bytes": 256, **handoff}}
    )


class PaperEngine:
    """Does what Step, Copy, Digest and Poison say."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[Content] = [EMPTY] * num_blocks
        self.slots: dict[int, list[Content]] = {}
        self.tables: dict[int, list[int]] = defaultdict(list)

    def step(self, step: Step, truths: Sequence[Sequence[int]]) -> StepDone:
        """Run a plan. `truths`: per row the tokens that it must find when it reads everything up to its end."""
        for sequence in step.drop:
            self.tables.pop(sequence, None)
        samples: list[list[Sampled]] = []
        filled: list[FilledBlock] = []
        for row, truth in zip(step.rows, truths, strict=True):
            prefix = self._run(row)
            assert prefix == list(truth), f"sequence {row.sequence} was computed from {prefix}, not from {truth}"
            samples.append([Sampled(draw(prefix, s.index, s.seed), None, []) for s in row.samples])
            digests = [(fill, digest_of(self.blocks[fill.block])) for fill in row.fills]
            filled += [FilledBlock(fill.block, row.sequence, fill.generation, digest) for fill, digest in digests]
        return StepDone(step.plan, samples, filled, {}, 0.01)

    def copy(self, command: Copy) -> list[bytes]:
        """A slot into blocks; the digests of the copies."""
        brought = [*self.slots[command.slot], *[EMPTY] * len(command.blocks)]
        for block, content in zip(command.blocks, brought, strict=False):
            self.blocks[block] = content
        return self.digest(command.blocks)

    def digest(self, blocks: Sequence[int]) -> list[bytes]:
        return [digest_of(self.blocks[block]) for block in blocks]

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks[block] = EMPTY

    def _run(self, row: Row) -> list[int]:
        table = self.tables[row.sequence]
        assert row.tokens, "a row without tokens"
        assert row.table_from <= len(table), "a hole in a block table"
        table[row.table_from :] = row.new_blocks
        if row.write:
            for position, token in enumerate(row.tokens, row.start):
                block = table[position // B]
                cells = list(self.blocks[block])
                cells[position % B] = (position, token)
                self.blocks[block] = tuple(cells)
        return [self._read(row.sequence, position) for position in range(row.start + len(row.tokens))]

    def _read(self, sequence: int, position: int) -> int:
        cell = self.blocks[self.tables[sequence][position // B]][position % B]
        assert cell is not None, f"sequence {sequence} reads position {position}, which nobody wrote"
        assert cell[0] == position, f"sequence {sequence} reads position {position} and finds {cell}"
        return cell[1]
