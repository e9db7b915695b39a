"""Requests of a trace in Mooncake's format: one JSON object a line, with `timestamp` (ms), `input_length`,
`output_length` and `hash_ids`, which name the blocks of 512 positions of the prompt: equal ids, equal prefix.

Prompts are scaled: SCALE positions of the trace become one here, a block of 512 becomes one block of 64. Numbers of
written tokens are not. The hardware is scaled alike (`Hardware.scaled`), so every time stays that of the trace.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import orjson

from cluster.core.keys import BlockKey, KeyChain, root_key

SCALE = 8
TRACE_BLOCK = 512
BLOCK = TRACE_BLOCK // SCALE
FINGERPRINT = b"modelled"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when (seconds from the first), its prompt's blocks and length in positions, and what it writes."""

    at: float
    hash_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def prompt(self) -> tuple[int, ...]:
        """Token ids: equal where the trace says that prompts are."""
        ids: list[int] = []
        for block in self.hash_ids:
            ids += (block, *range(BLOCK - 1))
        return tuple(ids[: self.prompt_tokens])


def read_trace(path: Path, most: int | None = None) -> list[Ask]:
    """The first `most` requests of a trace file, in order of time. Raises OSError, ValueError."""
    asks = []
    for line in path.read_bytes().splitlines()[:most]:
        row = orjson.loads(line)
        length = max(1, round(row["input_length"] / SCALE))
        hash_ids = tuple(row["hash_ids"][: -(-length // BLOCK)])
        asks.append(Ask(row["timestamp"] / 1000, hash_ids, length, max(1, row["output_length"])))
    return sorted(asks, key=lambda ask: ask.at)


def arriving(asks: list[Ask], rate: float) -> list[Ask]:
    """The same requests in the same rhythm, at `rate` per second on average."""
    span = asks[-1].at - asks[0].at
    factor = len(asks) / rate / span if span else 0.0
    return [Ask((a.at - asks[0].at) * factor, a.hash_ids, a.prompt_tokens, a.output_tokens) for a in asks]


def repeated(asks: list[Ask]) -> float:
    """The share of all positions that an endless cache would have: blocks of a prefix seen before."""
    seen: set[int] = set()
    hits = total = 0
    for ask in asks:
        for block in ask.hash_ids:
            if block not in seen:
                break
            hits += min(BLOCK, ask.prompt_tokens)
        total += ask.prompt_tokens
        seen.update(ask.hash_ids)
    return hits / total


def gaps(asks: list[Ask]) -> list[float]:
    """Seconds between arrivals."""
    return [b.at - a.at for a, b in pairwise(asks)]


def keys_of(prompt: tuple[int, ...]) -> list[BlockKey]:
    """The block keys that a worker derives for itself."""
    return list(KeyChain(root_key(FINGERPRINT), BLOCK).extend(prompt))
