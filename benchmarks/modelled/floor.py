"""What no placement can be better than: each request alone on an idle cluster, its prefix cached where it could be.

A prefix could be held by somebody if an earlier request had it; with a cache of so many blocks, if it was not evicted
since as the least recently used one. What is left of a prompt is read chunk by chunk and waits for nothing.
"""

import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.modelled.decode import LATENCY_S
from benchmarks.modelled.hardware import Hardware
from benchmarks.modelled.traces import BLOCK, Ask
from benchmarks.timeline import percentile

HOPS = 2  # router to decode, decode to router: the least that any path takes


@dataclass(frozen=True, slots=True)
class Floor:
    """TTFT in seconds; `cached`: share of all prompt positions."""

    p50: float
    p99: float
    mean: float
    cached: float


def floor(asks: Sequence[Ask], hardware: Hardware, blocks: int = 0) -> Floor:
    """Over all requests. `blocks`: how many blocks the cluster could hold together; 0: no limit."""
    held: OrderedDict[int, None] = OrderedDict()
    times, cached = [], 0
    for ask in asks:
        known = 0
        for block in ask.hash_ids:
            if block not in held:
                break
            known += BLOCK
        known = min(known, (ask.prompt_tokens - 1) // BLOCK * BLOCK)
        cached += known
        times.append(HOPS * LATENCY_S + alone_s(hardware, known, ask.prompt_tokens))
        for block in reversed(ask.hash_ids):  # the last of a prompt is evicted first
            held[block] = None
            held.move_to_end(block)
        while blocks and len(held) > blocks:
            held.popitem(last=False)
    total = sum(ask.prompt_tokens for ask in asks)
    return Floor(percentile(times, 50) or 0.0, percentile(times, 99) or 0.0, statistics.fmean(times), cached / total)


def alone_s(hardware: Hardware, start: int, end: int) -> float:
    """To read positions [start, end) with nobody else there."""
    steps = -(-(end - start) // hardware.chunk)
    return steps * hardware.overhead_s + hardware.read_s(start, end - start)
