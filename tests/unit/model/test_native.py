"""The native forward against the torch model, over poisoned pools; and its promise: company in a step changes nothing.

Skipped where this CPU cannot run it; that it was built where there is a compiler is a test of its own.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from cluster.core.errors import ModelError
from engine.messages import FolderModel
from engine.model import native
from engine.model.base import ForwardRow
from engine.model.config import load_config
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.model.native import NativeModel
from engine.model.quantise import GROUP, Quantization, quantise
from engine.model.weights import Weights
from tests.checkpoints import make_checkpoint
from tests.unit.model.conftest import Checkpoint
from tests.unit.model.harness import PagedRun, Sequence, load, random_tokens

BLOCK = 16
TOKENS = random_tokens(150, seed=1)
WIDE: dict[str, object] = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
SMALL_NUMBERS: dict[str, object] = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 192}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", WIDE),
    "a vocabulary that fills no panel": ("llama", {**WIDE, "vocab_size": 321}),
    "all biases": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "one kv head": ("llama", {**WIDE, "num_key_value_heads": 1}),
    "no grouping": ("llama", {**WIDE, "num_key_value_heads": 4}),
    "heads of 64": ("llama", {**WIDE, "head_dim": 64}),
    "heads of 128": ("llama", {**WIDE, "head_dim": 128}),
    "more queries than a tile": ("llama", {**WIDE, "num_attention_heads": 32, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", WIDE),
    "small numbers": ("llama", SMALL_NUMBERS),
    "window": ("mistral-window", {**WIDE, "head_dim": 64}),
}

runs = pytest.mark.skipif(native.library() is None, reason="this CPU lacks AVX-512 BF16, or there is no compiler")
MANY_ROWS = (1, 16, 17, 33, 300)
KINDS = [pytest.param(False, id="avx512"), pytest.param(True, id="amx")]


def native_model(
    folder: Path,
    *,
    amx: bool,
    threads: int = 1,
    quantization: Quantization = "none",
    kv_dtype: str = "bfloat16",
) -> NativeModel:
    if amx and not native.has_amx():
        pytest.skip("this CPU has no AMX")
    config = load_config(folder)
    with Weights(folder, config, "bfloat16", quantization) as weights:
        return NativeModel(config, weights, BLOCK, b"", threads, amx=amx, kv_dtype=kv_dtype)


def mean_errors(every: list[PagedRun], chunks: tuple[int, ...]) -> list[float]:
    """Of all but the first, against the first: squared, relative to the logits' square, over all ends of chunks."""
    errors: list[list[float]] = [[] for _ in every[1:]]
    for chunk in chunks:
        tokens = TOKENS[:75] if chunk == 1 else TOKENS
        fed = [run.feed(Sequence(tokens), chunk) for run in every]
        for (_, expected), *found in zip(*fed, strict=True):
            for of, (_, logits) in zip(errors, found, strict=True):
                of.append(float(np.square(logits - expected).mean() / np.square(expected).mean()))
        for run in every:
            run.forget()
    return [float(np.mean(of)) for of in errors]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler: torch does the work")
@pytest.mark.skipif(not native.cpu_flags() >= native.NEEDED, reason="this CPU cannot run it")
def test_it_was_built() -> None:
    assert native.library() is not None


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_as_near_to_float32_as_torch_in_bfloat16(variant: str, amx: bool, checkpoint: Checkpoint) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = checkpoint(architecture, **overrides)
    torches = [load(folder, BLOCK, dtype, "torch") for dtype in ("float32", "bfloat16")]
    every = [PagedRun(model) for model in (*torches, native_model(folder, amx=amx))]
    theirs, ours = mean_errors(every, (len(TOKENS), 40, 1))
    assert ours <= 1.1 * theirs


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("variant", ["llama", "heads of 64", "heads of 128", "one kv head", "qwen3", "window"])
def test_kv_in_int8_is_as_near_to_float32_with_it_as_torch_in_bfloat16(
    variant: str, amx: bool, checkpoint: Checkpoint
) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = checkpoint(architecture, **overrides)
    torches = [load(folder, BLOCK, dtype, "torch", kv_dtype="int8") for dtype in ("float32", "bfloat16")]
    every = [PagedRun(model) for model in (*torches, native_model(folder, amx=amx, kv_dtype="int8"))]
    theirs, ours = mean_errors(every, (len(TOKENS), 40, 1))
    assert ours <= 1.1 * theirs


@runs
@pytest.mark.parametrize("overrides", [WIDE, {**WIDE, "head_dim": 128}])
def test_kv_of_the_first_layer_is_the_codecs_to_a_step(overrides: dict[str, object], checkpoint: Checkpoint) -> None:
    """Of vectors that arithmetic in bfloat16 has moved a little: so are the values, and the scales beside them."""
    folder = checkpoint("llama", **overrides)
    torches = load(folder, BLOCK, "float32", "torch", kv_dtype="int8")
    pages = []
    for run in (PagedRun(torches), PagedRun(native_model(folder, amx=False, kv_dtype="int8"))):
        sequence = Sequence(TOKENS[:32])
        run.feed(sequence, 32)
        layout = run.model.layout
        first = run.pool[sequence.table].reshape(2, layout.kv_heads, layout.layers, 2, layout.page_bytes)[:, :, 0]
        pages.append(first.reshape(-1, layout.page_bytes))
    count = BLOCK * layout.head_dim
    steps = np.abs(np.diff(np.stack([page[:, :count].view(np.int8).astype(int) for page in pages]), axis=0))
    scales = [np.ascontiguousarray(page[:, count:]).view(np.float32) for page in pages]
    np.testing.assert_allclose(scales[1], scales[0], rtol=0.02)
    assert steps.max() <= 3
    assert steps.mean() < 0.3


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_what_float32_gives_with_them(
    quantization: Quantization, amx: bool, checkpoint: Checkpoint
) -> None:
    """With the same rounded weights; beside torch in bfloat16 only the activations are rounded more, to 8 bits."""
    folder = checkpoint("llama", **SMALL_NUMBERS, num_hidden_layers=1)  # more of them amplify any error
    torches = [load(folder, BLOCK, dtype, "torch", quantization) for dtype in ("float32", "bfloat16")]
    every = [PagedRun(model) for model in (*torches, native_model(folder, amx=amx, quantization=quantization))]
    theirs, ours = mean_errors(every, (len(TOKENS), 40, 1))
    assert ours < 3 * theirs + 0.005


@runs
@pytest.mark.skipif(not native.has_amx(), reason="this CPU has no AMX")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_whole_numbers_give_the_same_bits_on_either_kind_of_cpu_for_any_number_of_rows(
    quantization: Quantization, checkpoint: Checkpoint
) -> None:
    """With one token attention has nothing to weigh, so that every sum that differs between the kinds is left out."""
    folder = checkpoint("llama", **SMALL_NUMBERS, mlp_bias=True)
    tokens = random_tokens(MANY_ROWS[-1], seed=2)
    runs = [
        PagedRun(native_model(folder, amx=amx, quantization=quantization), num_blocks=len(tokens))
        for amx in (False, True)
    ]
    expected: NDArray[np.float32] | None = None
    for count in reversed(MANY_ROWS):
        for run in runs:
            run.forget()
            found = run.model.run([run.row(Sequence([token]), 1) for token in tokens[:count]])
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected[:count])


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("hidden", [64, 128, 576])
def test_the_vocabularys_product_is_its_definition_to_the_bit(hidden: int, amx: bool, tmp_path: Path) -> None:
    """Where layers add nothing and embeddings are 1 and -1, the norm's weight with these signs is multiplied."""
    shape: dict[str, object] = {"hidden_size": hidden, "head_dim": 64, "intermediate_size": 64, "vocab_size": 321}
    folder = make_checkpoint(tmp_path, "llama", 0, **shape)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    embedding = tensors["model.embed_tokens.weight"].sign()
    tensors["model.embed_tokens.weight"] = embedding
    norm = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run = PagedRun(native_model(folder, amx=amx, quantization="int8"), num_blocks=MANY_ROWS[-1])
    tokens = random_tokens(MANY_ROWS[-1], seed=3)
    expected = scaled_product(embedding[tokens].numpy() * norm.float().numpy(), tensors["lm_head.weight"].bfloat16())
    for count in MANY_ROWS:
        run.forget()
        found = run.model.run([run.row(Sequence([token]), 1) for token in tokens[:count]])
        np.testing.assert_array_equal(found, expected[:count])


def scaled_product(x_TI: NDArray[np.float32], weight_OI: torch.Tensor) -> NDArray[np.float32]:
    """x W^T as native code defines it: group after group sum * weight's scale, rounded, * row's, added, rounded."""
    q_OI, scales = quantise(weight_OI, 8)
    scale_OG = (scales.numpy().view(np.int32) & ~3).view(np.float32)  # two bits less, as they are packed
    total_TO = np.zeros((len(x_TI), len(q_OI)), dtype=np.float32)
    for g in range(scale_OG.shape[1]):
        group = slice(g * GROUP, (g + 1) * GROUP)
        most_T1 = np.abs(x_TI[:, group]).max(axis=1, keepdims=True)
        rows = np.rint(x_TI[:, group] * (np.float32(127) / most_T1)).astype(np.int64)
        sums = (rows @ q_OI[:, group].numpy().astype(np.int64).T).astype(np.float32) * scale_OG[:, g]
        exact = sums.astype(np.longdouble) * (most_T1 / np.float32(127)) + total_TO
        total_TO = exact.astype(np.float32)
    return total_TO


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize(
    ("variant", "quantization", "kv_dtype"),
    [
        ("llama", "none", "bfloat16"),
        ("heads of 64", "none", "bfloat16"),
        ("window", "none", "bfloat16"),
        ("more queries than a tile", "none", "bfloat16"),
        ("small numbers", "int8", "bfloat16"),
        ("small numbers", "int4", "bfloat16"),
        ("heads of 64", "none", "int8"),
        ("window", "none", "int8"),
    ],
)
def test_company_and_chunks_change_no_bit(
    variant: str, quantization: Quantization, kv_dtype: str, amx: bool, checkpoint: Checkpoint
) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = checkpoint(architecture, **overrides)
    model = native_model(folder, amx=amx, quantization=quantization, kv_dtype=kv_dtype)
    run = PagedRun(model, num_blocks=96)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        cuts=st.sets(st.integers(1, len(TOKENS) - 1), max_size=6),
        company=st.lists(st.integers(1, 70), max_size=3),
        behind=st.booleans(),
    )
    def property_holds(cuts: set[int], company: list[int], behind: bool) -> None:
        run.forget()
        whole = Sequence(TOKENS)
        expected = run.model.run([run.row(whole, len(TOKENS))])[0]
        parts = Sequence(TOKENS)
        for end in (*sorted(cuts), len(TOKENS)):
            others = [run.row(Sequence(random_tokens(n, seed=n)), n) for n in company if run.room(n + len(TOKENS))]
            own = run.row(parts, end - parts.done)
            rows = [own, *others] if behind else [*others, own]
            found = run.model.run(rows)[0 if behind else -1]
        np.testing.assert_array_equal(found, expected)
        for one, other in zip(whole.table[:-1], parts.table[:-1], strict=True):
            np.testing.assert_array_equal(run.pool[one], run.pool[other])

    property_holds()


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("factor", [30.0, 3000.0])
def test_scores_that_are_far_apart_change_no_bit(factor: float, amx: bool, tmp_path: Path) -> None:
    """Weights that outgrow the first guess of their size are made once more, and those too small for a float are 0."""
    folder = make_checkpoint(tmp_path, "llama", 0, **{**WIDE, "head_dim": 64})
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "q_proj" in name:
            tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run = PagedRun(native_model(folder, amx=amx))
    one_by_one = run.feed(Sequence(TOKENS), 1)[-1][1]
    assert np.isfinite(one_by_one).all()
    for chunk in (len(TOKENS), 37):
        run.forget()
        np.testing.assert_array_equal(run.feed(Sequence(TOKENS), chunk)[-1][1], one_by_one)


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0])
@pytest.mark.parametrize("chunk", [70, 1])
def test_a_key_that_is_not_a_number_is_not_lost(chunk: int, bits: int, amx: bool, checkpoint: Checkpoint) -> None:
    """Either sign of NaN, in one place of a key that was computed before: whoever sees it knows no token."""
    run = PagedRun(native_model(checkpoint("llama", **{**WIDE, "head_dim": 64}), amx=amx))
    sequence = Sequence(TOKENS)
    run.model.run([run.row(sequence, 80)])
    layout = run.model.layout
    shape = (layout.kv_heads, layout.layers, 2, BLOCK, layout.head_dim)
    pages = run.pool[sequence.table[0]].view(np.uint16).reshape(shape)
    pages[:, 0, 0, 5, 33] = bits
    assert np.isnan(run.model.run([run.row(sequence, chunk)])[0]).all()


@runs
@pytest.mark.parametrize("amx", KINDS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_is_told_of_a_position_is_what_a_draw_would_see(
    quantization: Quantization, amx: bool, checkpoint: Checkpoint
) -> None:
    """To the bit: all positions of a chunk are told as the last one is returned, in company as well."""
    run = PagedRun(native_model(checkpoint("llama", **SMALL_NUMBERS), amx=amx, quantization=quantization))
    expected = np.stack([logits for _, logits in run.feed(Sequence(TOKENS), 1)])
    run.forget()
    sequence, told = Sequence(TOKENS), list[NDArray[np.float32]]()
    while sequence.done < len(TOKENS):
        own = run.row(sequence, min(70, len(TOKENS) - sequence.done), logits=False)
        rows = [run.row(Sequence(TOKENS[:33]), 33), replace(own, scored=range(len(own.tokens)))]
        np.testing.assert_array_equal(run.model.run(rows, told.append)[0], expected[32])
    np.testing.assert_array_equal(np.concatenate(told), expected)


@runs
@pytest.mark.parametrize("amx", KINDS)
def test_threads_change_no_bit(amx: bool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", **WIDE)
    results = []
    for threads in (1, 3):
        run = PagedRun(native_model(folder, amx=amx, threads=threads))
        rows = [run.row(Sequence(random_tokens(n, seed=n)), n) for n in (33, 1, 70)]
        results.append(run.model.run(rows))
    np.testing.assert_array_equal(results[0], results[1])


@runs
def test_a_row_that_does_not_write_leaves_the_pool_alone(checkpoint: Checkpoint) -> None:
    run = PagedRun(native_model(checkpoint("llama", **WIDE), amx=False))
    sequence = Sequence(TOKENS)
    expected = run.feed(sequence, len(TOKENS))[0][1]
    before = run.pool.copy()
    last = ForwardRow(TOKENS[-1:], len(TOKENS) - 1, sequence.table, write=False, logits=True)
    np.testing.assert_array_equal(run.model.run([last])[0], expected)
    np.testing.assert_array_equal(run.pool, before)


@runs
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ForwardRow([320], 0, [0], True, True), "token id"),
        (ForwardRow([-1], 0, [0], True, True), "token id"),
        (ForwardRow([1], 600, list(range(40)), True, True), "beyond the context"),
        (ForwardRow([1], 16, [0], True, True), "needs 2"),
        (ForwardRow([1], 0, [99_999], True, True), "a block outside"),
        (ForwardRow([], 0, [0], True, True), "0 tokens"),
    ],
)
def test_an_impossible_row_is_refused(row: ForwardRow, words: str, checkpoint: Checkpoint) -> None:
    run = PagedRun(native_model(checkpoint("llama", **WIDE), amx=False))
    with pytest.raises(ModelError, match=words):
        run.model.run([row])


def test_the_setting_decides(checkpoint: Checkpoint) -> None:
    narrow, wide = checkpoint("llama"), checkpoint("llama", **WIDE)
    assert isinstance(load(wide, BLOCK, "bfloat16", "torch"), LlamaModel)
    assert isinstance(load(wide, BLOCK, "float32"), LlamaModel)
    assert isinstance(load(narrow, BLOCK, "bfloat16"), LlamaModel)
    kind = LlamaModel if native.library() is None else NativeModel
    assert isinstance(load(wide, BLOCK, "bfloat16"), kind)
    for folder, dtype, words in ((wide, "float32", "dtype is float32"), (narrow, "bfloat16", "head_dim 16")):
        with pytest.raises(ModelError, match=words):
            load_model(FolderModel(str(folder), dtype, kernels="native"), BLOCK, threads=1)


def test_flags_are_read_from_the_first_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512f amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert native.cpu_flags(cpuinfo) >= {"avx512f", "amx_tile"}
    assert native.cpu_flags(tmp_path / "none") == frozenset()
