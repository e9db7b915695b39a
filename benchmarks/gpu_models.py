"""Speed on a device beside what the device can do: random weights, so that no checkpoint is needed."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu_kernels import attention, pool_of
from engine.gpu.kernels.digest import digest_blocks
from engine.gpu.operators import TritonOperators
from engine.layout import KVLayout
from engine.model.base import ForwardRow
from engine.model.config import AttentionConfig, ModelConfig, RopeConfig
from engine.model.dtypes import TORCH_DTYPES
from engine.model.llama import LlamaModel
from engine.model.operators import wait_for
from engine.model.weights import Weights, expected_shapes

BLOCK = 16
GB, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `of_floor`: the part of what the device can do, where there is a floor."""

    what: str
    value: float
    unit: str
    of_floor: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device can do, measured: bytes and operations a second."""

    read: float
    matrix: float


@dataclass(frozen=True, slots=True)
class Size:
    """Cases of one run: batches and contexts of decode, tokens of a prefill, rounds of each timing."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    rounds: int


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelConfig:
    """A Llama of this shape."""
    attention_config = AttentionConfig(heads, kv_heads, hidden // heads, False, False, False, None)
    rope = RopeConfig("default", 500_000.0)
    return ModelConfig(
        "LlamaForCausalLM", vocab, hidden, inner, layers, attention_config, rope, 1e-5, False, tied, 131_072, (2,)
    )


MODELS = {
    "1B": llama(2048, 8192, 16, 32, 8, 128_256, tied=True),
    "8B": llama(4096, 14336, 32, 32, 8, 128_256, tied=False),
}
TINY = {"tiny": llama(32, 48, 1, 2, 1, 64, tied=False)}
FULL = Size((1, 8, 32), (1024, 4096), (512, 2048), 10)
DRY = Size((1, 2), (20,), (20,), 1)


class RandomWeights(Weights):
    """Weights of a shape and no file."""

    def __init__(self, config: ModelConfig, dtype: str, device: torch.device) -> None:
        self.dtype_name, self.quantization, self.device = dtype, "none", device
        self._shapes = expected_shapes(config)

    def take(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], dtype=TORCH_DTYPES[self.dtype_name], device=self.device)
        return tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)


def limits(device: torch.device, *, dry: bool) -> tuple[Limits, list[Figure]]:
    """Bandwidth of a large copy (read and written bytes both count), and of a large bfloat16 product."""
    size, side = (1 << 20, 128) if dry else (4 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    read = 2 * size / seconds(lambda: target.copy_(source), device, 5)
    left, right = (torch.randn((side, side), device=device).bfloat16() for _ in range(2))
    matrix = 2 * side**3 / seconds(lambda: left @ right, device, 5)
    return Limits(read, matrix), [
        Figure("memory, a copy", read / GB, "GB/s"),
        Figure("matrix product, bfloat16", matrix / TERA, "TFLOP/s"),
    ]


def model_figures(
    name: str, config: ModelConfig, size: Size, floor: Limits, device: torch.device, left: Callable[[], bool]
) -> Iterator[Figure]:
    """Steps of a whole model. `left`: whether there is time for another figure."""
    dtype = "bfloat16"
    model = LlamaModel(config, RandomWeights(config, dtype, device), BLOCK, b"", TritonOperators)
    longest = max(batch * (context // BLOCK + 1) for batch in size.batches for context in size.contexts)
    blocks = max(longest, max(size.prompts) // BLOCK + 1)
    model.bind(torch.zeros((blocks, model.layout.block_bytes), dtype=torch.uint8, device=device))
    products, head = product_sizes(config)
    for context in size.contexts:
        for batch in size.batches:
            if not left():
                return
            pages = context // BLOCK + 1
            tables = [list(range(row * pages, (row + 1) * pages)) for row in range(batch)]
            rows = [ForwardRow([7], context, table, write=True, logits=True) for table in tables]
            step = seconds(partial(model.run, rows), device, size.rounds)
            read = 2 * (products + head) + batch * context * model.layout.token_bytes
            yield Figure(f"{name}: decode, {batch} x {context}", step * 1e3, "ms", read / step / floor.read)
    for tokens in size.prompts:
        if not left():
            return
        rows = [ForwardRow([7] * tokens, 0, list(range(tokens // BLOCK + 1)), write=True, logits=True)]
        step = seconds(partial(model.run, rows), device, size.rounds)
        attended = 2 * config.layers * config.attention.heads * config.attention.head_dim * tokens * tokens
        work = 2 * products * tokens + 2 * head + attended
        yield Figure(f"{name}: prefill, {tokens} tokens", tokens / step, "tok/s", work / step / floor.matrix)


def kernel_figures(config: ModelConfig, size: Size, floor: Limits, device: torch.device) -> Iterator[Figure]:
    """Attention and digest alone, of one layer of a model."""
    heads, kv_heads, head_dim = config.attention.heads, config.attention.kv_heads, config.attention.head_dim
    layout = KVLayout(2, kv_heads, head_dim, BLOCK, "bfloat16")
    for batch, context in ((size.batches[0], size.contexts[-1]), (size.batches[-1], size.contexts[-1])):
        kv, rows = pool_of(layout, ((context, 1),) * batch, device)
        q_TAD = torch.randn((batch, heads, head_dim), device=device).bfloat16()
        step = seconds(partial(attention, kv, rows, q_TAD, None, device), device, size.rounds)
        read = batch * context * layout.token_bytes / layout.layers
        yield Figure(f"attention, decode, {batch} x {context}", read / step / GB, "GB/s", read / step / floor.read)
    tokens = size.prompts[-1]
    kv, rows = pool_of(layout, ((0, tokens),), device)
    q_TAD = torch.randn((tokens, heads, head_dim), device=device).bfloat16()
    step = seconds(partial(attention, kv, rows, q_TAD, None, device), device, size.rounds)
    work = 2 * heads * head_dim * tokens * tokens
    yield Figure(f"attention, prefill, {tokens}", work / step / TERA, "TFLOP/s", work / step / floor.matrix)
    pool = torch.zeros((2 if size is DRY else 512, layout.block_bytes), dtype=torch.uint8, device=device)
    which = torch.arange(len(pool), device=device)
    read = pool.numel() / seconds(lambda: digest_blocks(pool, which, kv_heads), device, size.rounds)
    yield Figure(f"digest of {pool.numel() >> 20} MB", read / GB, "GB/s", read / floor.read)


def product_sizes(config: ModelConfig) -> tuple[int, int]:
    """Weights of the layers' products, and of the vocabulary's."""
    shapes = expected_shapes(config)
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if "_proj" in name and len(shape) == 2)
    return layers, config.vocab_size * config.hidden_size


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of one call, the device's work included; the first two calls do not count."""
    for _ in range(2 if device.type == "cuda" else 0):
        run()
    times = []
    for _ in range(rounds):
        wait_for(device)
        began = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
