"""The engine alone, on one core, as a fraction of what the core can do at all (MEASURE: "floor").

    python -m benchmarks.engine [--model smollm2-135m] [--core 1] [--rounds 3]

1. The floors: how fast one core reads memory that is in no cache, and how fast it multiplies bfloat16 matrices of the
   model's own shapes (the better of oneDNN's and our own product).
2. Decode: one step by batch and context. Floor: bytes of weights and KV / read bandwidth.
3. Prefill: a prompt in chunks of 256, and by chunk. Floor: operations of the products / matrix peak; attention apart.

Native code and torch take turns, round by round; the medians are shown. KV is made up: its values change no time.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import describe_machine, today
from benchmarks.report import head, publish
from cluster.core.clock import SystemClock
from cluster.core.errors import HeadraceError
from cluster.models.pull import pull
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache, resolve
from engine.messages import FolderModel
from engine.model.base import ForwardRow, Model
from engine.model.config import ModelConfig, load_config
from engine.model.loader import load_model
from engine.model.native import NativeModel, library
from engine.pages import allocate

RESULTS = Path(__file__).with_name("results")
BLOCK = 16
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (128, 1024, 4096)
LENGTHS = (128, 512, 1024, 2048, 4096)
CHUNKS = (64, 128, 256, 512)
CHUNK = 256
READ_BYTES = 1 << 29
DECODE, PREFILL, CHUNKED = "decode", "prefill", "chunk"


@dataclass(frozen=True, slots=True)
class Floors:
    """What one core can do. `read`: bytes/s; `multiply`: operations/s (an addition and a product are two)."""

    read: float
    multiply: float


@dataclass(frozen=True, slots=True)
class Case:
    """One timed piece of work."""

    kind: str
    batch: int
    context: int
    chunk: int

    def label(self) -> str:
        if self.kind == DECODE:
            return f"{self.batch} x {self.context}"
        return f"{self.context} by {self.chunk}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of one kind of kernels: medians over rounds. `attention` and `python` are parts of it, where known."""

    seconds: float
    attention: float | None = None
    python: float | None = None


class Subject:
    """One loaded model with a pool large enough for every case."""

    def __init__(self, folder: Path, kernels: str, blocks: int) -> None:
        spec = FolderModel(str(folder), "bfloat16", kernels="native" if kernels == "native" else "torch")
        self.name = kernels
        self.model: Model = load_model(spec, BLOCK, threads=1)
        noise = np.random.default_rng(0).integers(0, 0x3C00, size=1 << 20, dtype=np.uint16)  # small finite numbers
        size = self.model.layout.block_bytes
        self._pool: NDArray[np.uint8] = allocate(blocks * size).reshape(blocks, size)
        self._pool[:] = np.resize(noise.view(np.uint8), (blocks, size))
        self.model.bind(self._pool)

    def time(self, case: Case) -> Figure:
        """Run it once."""
        native = self.model if isinstance(self.model, NativeModel) else None
        before = native.spent() if native else {}
        first = time.perf_counter()
        for rows in steps(case):
            self.model.run(rows)
        seconds = time.perf_counter() - first
        if native is None:
            return Figure(seconds)
        spent = {name: (cycles - before[name]) * seconds_per_cycle() for name, cycles in native.spent().items()}
        return Figure(seconds, spent["attention"], seconds - sum(spent.values()))


@cache
def seconds_per_cycle() -> float:
    """Of the time stamp counter, from two readings of both clocks."""
    code = library()
    assert code is not None
    began, first = time.perf_counter(), code.hr_cycles()
    time.sleep(0.2)
    return float((time.perf_counter() - began) / (code.hr_cycles() - first))


def steps(case: Case) -> list[list[ForwardRow]]:
    """The plans of a case, in order."""
    per_row = -(-(case.context + 1) // BLOCK)
    tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(case.batch)]
    if case.kind == DECODE:
        return [[ForwardRow([7 + row], case.context, table, True, True) for row, table in enumerate(tables)]]
    ids = [token % 40_000 for token in range(5, 5 + 7 * case.context, 7)]
    starts = range(0, case.context, case.chunk)
    return [
        [ForwardRow(ids[start : start + case.chunk], start, tables[0], True, start + case.chunk >= case.context)]
        for start in starts
    ]


def cases() -> list[Case]:
    """Everything that is timed."""
    decode = [Case(DECODE, batch, context, 1) for context in CONTEXTS for batch in BATCHES]
    prefill = [Case(PREFILL, 1, length, CHUNK) for length in LENGTHS]
    return [*decode, *prefill, *(Case(CHUNKED, 1, 1024, chunk) for chunk in CHUNKS)]


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[outputs, inputs] of one layer's products."""
    attention, hidden, inner = config.attention, config.hidden_size, config.intermediate_size
    heads = attention.head_dim * attention.heads
    qkv = heads + 2 * attention.head_dim * attention.kv_heads
    return [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that a decode step reads, KV apart: every product's weight once."""
    layer = sum(outputs * inputs for outputs, inputs in product_shapes(config))
    return 2 * (config.layers * layer + config.vocab_size * config.hidden_size)


def operations(config: ModelConfig, tokens: int) -> int:
    """Of a prompt's products; attention apart, one row of logits."""
    layer = sum(outputs * inputs for outputs, inputs in product_shapes(config))
    return 2 * (config.layers * layer * tokens + config.vocab_size * config.hidden_size)


def measure_floors(config: ModelConfig) -> Floors:
    """The best of many tries: a floor is what the core can do when nobody disturbs it."""
    memory = allocate(READ_BYTES)
    memory.fill(1)
    code = library()
    if code is not None:
        read = _best(lambda: code.hr_read(memory.ctypes.data, READ_BYTES), 5)
    else:
        words = torch.from_numpy(memory).view(torch.int64)
        read = _best(lambda: torch.sum(words), 5)
    seconds = flops = 0.0
    for outputs, inputs in product_shapes(config):
        x = torch.randn(CHUNK, inputs).bfloat16()
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs).bfloat16(), CHUNK)
        product = partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], "")
        seconds += _best(product, 30)
        flops += 2 * CHUNK * outputs * inputs
    return Floors(READ_BYTES / read, flops / seconds)


def _best(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def measure(folder: Path, rounds: int) -> dict[str, dict[str, Figure]]:
    """Kernels -> case -> figure."""
    per_row = -(-(max(CONTEXTS) + 1) // BLOCK)
    kinds = ["torch"] if library() is None else ["native", "torch"]
    subjects = [Subject(folder, kind, per_row * max(BATCHES)) for kind in kinds]
    found: dict[str, dict[str, list[Figure]]] = {subject.name: {} for subject in subjects}
    for case in cases():
        for subject in subjects:
            subject.time(case)  # once for the caches
        for _ in range(rounds):
            for subject in subjects:
                found[subject.name].setdefault(f"{case.kind} {case.label()}", []).append(subject.time(case))
    return {name: {case: _median(figures) for case, figures in rows.items()} for name, rows in found.items()}


def _median(figures: list[Figure]) -> Figure:
    return sorted(figures, key=lambda figure: figure.seconds)[len(figures) // 2]


def table(config: ModelConfig, floors: Floors, kv_bytes: int, figures: dict[str, dict[str, Figure]]) -> str:
    """Markdown."""
    lines = [
        f"- one core reads {floors.read / 1e9:.1f} GB/s and multiplies at {floors.multiply / 1e9:.0f} GFLOP/s "
        f"(bfloat16, [{CHUNK}, inputs] x the model's own weights)",
        f"- a decode step reads {weight_bytes(config) / 1e6:.0f} MB of weights and {kv_bytes:,} bytes of KV a position",
        "",
        "| work | " + " | ".join(f"{name}, ms" for name in figures) + " | floor, ms | native: share of the floor "
        "reached | attention, ms | Python, ms |",
        "| --- |" + " --- |" * (len(figures) + 4),
    ]
    for case in cases():
        row = {name: found[f"{case.kind} {case.label()}"] for name, found in figures.items()}
        if case.kind == DECODE:
            floor = (weight_bytes(config) + kv_bytes * case.context * case.batch) / floors.read
        else:
            floor = operations(config, case.context) / floors.multiply
        best = row.get("native") or next(iter(row.values()))
        apart = best.attention if case.kind != DECODE and best.attention is not None else 0.0
        cells = [f"{figure.seconds * 1e3:.1f}" for figure in row.values()]
        cells += [f"{floor * 1e3:.1f}", f"{floor / (best.seconds - apart):.0%}", _ms(best.attention), _ms(best.python)]
        lines.append(f"| {case.kind} {case.label()} | " + " | ".join(cells) + " |")
    lines += ["", "decode: batch x context; prefill and chunk: tokens by chunk, attention left out of the share."]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="The engine alone, on one core")
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a Hugging Face folder")
    parser.add_argument("--core", type=int, default=None, help="which core; the last one there is by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.engine", arguments)
    core = max(os.sched_getaffinity(0)) if options.core is None else options.core
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        if options.model in KNOWN_MODELS:
            pull(options.model, default_cache())
        folder = resolve(options.model, default_cache())
        config = load_config(folder)
        before = measure_floors(config)
        figures = measure(folder, options.rounds)
        after = measure_floors(config)
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    floors = Floors(statistics.mean((before.read, after.read)), statistics.mean((before.multiply, after.multiply)))
    attention = config.attention
    kv_bytes = 4 * config.layers * attention.kv_heads * attention.head_dim
    heading = f"# The engine on core {core}: {options.model}"
    text = "\n".join([heading, "", *head(machine), "", table(config, floors, kv_bytes, figures), ""])
    document = {
        "machine": machine,
        "floors": [asdict(before), asdict(after)],
        "figures": {name: {case: asdict(figure) for case, figure in rows.items()} for name, rows in figures.items()},
    }
    stem = f"{today(clock)}-{options.model.rstrip('/').rsplit('/', 1)[-1]}-engine"
    publish(options.out, stem, text, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
