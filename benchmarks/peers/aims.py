"""What Headrace aims at beside its peers, and the ratios that say how near it is. Pure.

A ratio is taken per turn: one system's figure over the other's with the same seed, the same prompts and arrivals,
minutes apart. Shown are its median, least and greatest over the turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench import Run
from benchmarks.figures import Spread, spread
from benchmarks.peers.plan import (
    AGGREGATED,
    CAPACITY,
    INT8,
    LLAMA,
    MANY,
    MEMORY,
    MIXED,
    OPENVINO,
    SINGLE,
    SPLIT,
    VLLM_AGGREGATED,
    VLLM_SPLIT,
    prompt_name,
)

RATE, MEGABYTES = "rate", "memory_mb"  # figures beside those of figures.py


@dataclass(frozen=True, slots=True)
class Aim:
    """One line of the table. Without `theirs` the figure itself is held against `bound`.

    With several `theirs` it is the better of them in each turn. `most`: the ratio is to stay below `bound`.
    """

    label: str
    work: str
    figure: str
    ours: str
    theirs: tuple[str, ...]
    bound: float
    most: bool = True


def _tpot(ours: str, theirs: str, bound: float) -> Aim:
    return Aim("single stream, 32 in / 128 out: TPOT", SINGLE, "tpot_p50", ours, (theirs,), bound)


def _ttft(tokens: int, theirs: str, bound: float) -> Aim:
    return Aim(f"one prompt of {tokens:,}: TTFT", prompt_name(tokens), "ttft_p50", AGGREGATED, (theirs,), bound)


_THROUGHPUT = "8 streams a core, 512 in / 64 out: output tok/s"
_MIXED = "interference, chats:"
AIMS = (
    _tpot(AGGREGATED, VLLM_AGGREGATED, 0.5),
    _tpot(SPLIT, VLLM_SPLIT, 0.5),
    _tpot(AGGREGATED, f"{LLAMA} BF16", 1.0),
    _tpot(INT8, f"{LLAMA} Q8_0", 1.0),
    Aim(_THROUGHPUT, MANY, "output_tok_s", AGGREGATED, (VLLM_AGGREGATED,), 1.5, most=False),
    Aim(_THROUGHPUT, MANY, "output_tok_s", SPLIT, (VLLM_SPLIT,), 1.5, most=False),
    _ttft(1024, f"{OPENVINO} Q8_0", 1.1),
    _ttft(1024, f"{OPENVINO} Q4_1", 1.1),
    _ttft(2048, VLLM_AGGREGATED, 0.5),
    Aim(f"{_MIXED} share within the SLO", MIXED, "attainment", SPLIT, (), 0.97, most=False),
    Aim(f"{_MIXED} ITL p99", MIXED, "itl_p99", SPLIT, (VLLM_SPLIT,), 0.9),
    Aim(f"{_MIXED} TTFT p50", MIXED, "ttft_p50", SPLIT, (VLLM_SPLIT,), 0.5),
    Aim("highest chat rate served", CAPACITY, RATE, SPLIT, (VLLM_SPLIT, VLLM_AGGREGATED), 1.3, most=False),
    Aim("peak memory of a worker", MEMORY, MEGABYTES, AGGREGATED, (VLLM_AGGREGATED,), 0.5),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found for an aim. `ours` None: one of the two was not measured; `ratio` None: theirs was always 0."""

    aim: Aim
    ours: Spread | None
    theirs: Spread | None
    ratio: Spread | None

    @property
    def reached(self) -> bool | None:
        """By the median. More than nothing is more than any multiple of it."""
        if self.ratio is None:
            return None if self.ours is None or self.theirs is None else (self.ours.median > 0) != self.aim.most
        return self.ratio.median <= self.aim.bound if self.aim.most else self.ratio.median >= self.aim.bound


def judge(aim: Aim, runs: Sequence[Run]) -> Verdict:
    """Over every turn in which both were measured."""
    ours = _by_turn(aim, aim.ours, runs)
    if not aim.theirs:
        found = spread(ours.values())
        return Verdict(aim, found, None, found)
    best = min if aim.most else max
    each = [_by_turn(aim, name, runs) for name in aim.theirs]
    theirs = {turn: best(have[turn] for have in each if turn in have) for turn in {t for have in each for t in have}}
    shared = [turn for turn in ours if turn in theirs]
    return Verdict(
        aim,
        spread(ours[turn] for turn in shared),
        spread(theirs[turn] for turn in shared),
        spread(ours[turn] / theirs[turn] for turn in shared if theirs[turn]),
    )


def _by_turn(aim: Aim, setup: str, runs: Sequence[Run]) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for run in runs:
        value = run.figures.get(aim.figure)
        if run.workload == aim.work and run.setup == setup and value is not None:
            found[run.seed, run.repetition] = value
    return found
