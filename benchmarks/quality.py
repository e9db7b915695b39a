"""What rounding weights and KV costs: perplexity, agreement of the likeliest token, divergence, memory.

    python -m benchmarks.quality [--model smollm2-135m] [--tokens 20480]

The text is what Python itself explains (`pydoc_data.topics`), cut into 32 sequences that are read side by side, token
by token, as decode does. Every set-up sees the same tokens; the first one, bfloat16 without quantization, is the
measure.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.machine import describe_machine, today
from benchmarks.report import head, publish
from cluster.core.clock import SystemClock
from cluster.core.errors import HeadraceError
from cluster.models.pull import pull
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache, resolve
from engine.messages import FolderModel
from engine.model.base import ForwardRow, Model
from engine.model.loader import load_model
from engine.model.native import NativeModel
from engine.model.quantise import Quantization

RESULTS = Path(__file__).with_name("results")
SEQUENCES = 32
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """What weights are rounded to and KV is stored in."""

    quantization: Quantization = "none"
    kv_dtype: str = "bfloat16"


SETUPS = (Setup(), Setup(kv_dtype="int8"), Setup("int8"), Setup("int8", "int8"), Setup("int4"))


@dataclass(frozen=True, slots=True)
class Quality:
    """`divergence`: mean Kullback-Leibler divergence from the first set-up, nats. `agreement`: share of positions.

    `kv_bytes`: of one position, scales included.
    """

    quantization: str
    kv_dtype: str
    kernels: str
    perplexity: float
    agreement: float
    divergence: float
    weight_mb: float
    kv_bytes: int


def text() -> str:
    """What ships with Python, in a fixed order."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def load(folder: Path, setup: Setup, length: int) -> Model:
    """The model, over a pool that holds every sequence."""
    spec = FolderModel(str(folder), "bfloat16", quantization=setup.quantization, kv_dtype=setup.kv_dtype)
    model = load_model(spec, BLOCK, threads=1)
    blocks = SEQUENCES * -(-length // BLOCK)
    model.bind(np.zeros((blocks, model.layout.block_bytes), dtype=np.uint8))
    return model


def step(model: Model, ids: NDArray[np.int64], position: int) -> NDArray[np.float64]:
    """Log-probabilities [SEQUENCES, vocabulary] after `position` of every sequence."""
    blocks = -(-ids.shape[1] // BLOCK)
    rows = [
        ForwardRow([int(ids[s, position])], position, list(range(s * blocks, (s + 1) * blocks)), True, True)
        for s in range(SEQUENCES)
    ]
    return log_softmax(model.run(rows))


def measure(folder: Path, tokens: int) -> list[Quality]:
    """All set-ups side by side. Raises ModelError."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text()).ids[:tokens]
    length = len(ids) // SEQUENCES
    grid = np.array(ids[: length * SEQUENCES]).reshape(SEQUENCES, length)
    models = [load(folder, setup, length) for setup in SETUPS]
    loss, agreed, divergence = ([0.0] * len(models) for _ in range(3))
    for position in range(length - 1):
        found = [step(model, grid, position) for model in models]
        likely = found[0].argmax(axis=-1)
        for index, logs in enumerate(found):
            loss[index] -= float(logs[np.arange(SEQUENCES), grid[:, position + 1]].sum())
            agreed[index] += float((logs.argmax(axis=-1) == likely).sum())
            divergence[index] += float((np.exp(found[0]) * (found[0] - logs)).sum())
    count = SEQUENCES * (length - 1)
    return [
        Quality(
            setup.quantization,
            setup.kv_dtype,
            "native" if isinstance(model, NativeModel) else "torch",
            math.exp(loss[index] / count),
            agreed[index] / count,
            divergence[index] / count,
            model.weight_bytes / 1e6 if isinstance(model, NativeModel) else math.nan,
            model.layout.token_bytes,
        )
        for index, (setup, model) in enumerate(zip(SETUPS, models, strict=True))
    ]


def table(found: Sequence[Quality], tokens: int) -> str:
    """Markdown."""
    lines = [
        f"{tokens:,} tokens of Python's own help, {SEQUENCES} sequences side by side",
        "",
        "| weights | KV | kernels | perplexity | same likeliest token as the first | divergence, nats "
        "| weights, MB | KV, bytes a token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {q.quantization} | {q.kv_dtype} | {q.kernels} | {q.perplexity:.3f} | {q.agreement:.2%} "
        f"| {q.divergence:.5f} | {q.weight_mb:.0f} | {q.kv_bytes:,} |"
        for q in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description="What rounding costs")
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.quality", arguments)
    try:
        if options.model in KNOWN_MODELS:
            pull(options.model, default_cache())
        found = measure(resolve(options.model, default_cache()), options.tokens)
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    heading = f"# Quantised weights and KV: {options.model}"
    page = "\n".join([heading, "", *head(machine), "", table(found, options.tokens), ""])
    document = {"machine": machine, "quality": [asdict(q) for q in found]}
    stem = f"{today(clock)}-{options.model.rstrip('/').rsplit('/', 1)[-1]}-quality"
    publish(options.out, stem, page, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
