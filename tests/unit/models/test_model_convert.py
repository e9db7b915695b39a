"""GGUF -> Hugging Face folder, on a tiny file; the real model is in tests/integration/test_default_model.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cluster.core.errors import ModelError
from cluster.models.gguf_convert import convert
from cluster.models.gguf_tensors import hf_name, to_bfloat16, unpermute

Weights = dict[str, NDArray[np.float32]]
WriteGguf = Callable[[Path, Mapping[str, str | int | float | bool | list[str]]], Path]


@pytest.fixture(scope="session")
def folder(tiny_gguf: tuple[Path, Weights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted")
    convert(tiny_gguf[0], target)
    return target


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _bfloat16(value: float) -> int:
    return int(to_bfloat16(np.array([value], dtype=np.float32))[0])


# ---- pure parts


@given(heads=st.integers(1, 5), half=st.integers(1, 8), features=st.sampled_from([(), (1,), (3,)]))
def test_unpermute_undoes_llama_cpp(heads: int, half: int, features: tuple[int, ...]) -> None:
    rows = np.arange(heads * half * 2 * int(np.prod(features)), dtype=np.float32).reshape(-1, *features)
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute
    permuted = rows.reshape(heads, 2, half, *features).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(unpermute(permuted, heads), rows)


def test_unpermute_turns_neighbours_into_halves() -> None:
    stored = np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.float32)
    assert unpermute(stored, 1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_unpermute_refuses_rows_that_do_not_split() -> None:
    with pytest.raises(ModelError, match="6 rows of q or k do not split into 2 heads"):
        unpermute(np.zeros((6, 4), dtype=np.float32), 2)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_the_nearest_and_even_on_a_tie(value: float) -> None:
    below = _bits(value) & 0xFFFF0000  # towards zero
    above = below + 0x10000  # away from zero; the infinity stands for the next power of two
    distance_below, distance_above = (
        _bits(value) - below,
        above - _bits(value),
    )  # floats of one exponent are equidistant
    if distance_below == distance_above:
        expected = below if (below >> 16) % 2 == 0 else above
    else:
        expected = below if distance_below < distance_above else above
    assert _bfloat16(value) == expected >> 16


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.00390625, 0x3F80),  # 1 + 2**-8: the tie between 1 and 1 + 2**-7, even below
        (1.01171875, 0x3F82),  # 1 + 3 * 2**-8: the tie, even above
        (3.4028234663852886e38, 0x7F80),  # the largest float32 rounds to infinity
        (float("inf"), 0x7F80),
        (float("-inf"), 0xFF80),
    ],
)
def test_bfloat16_of_known_values(value: float, bits: int) -> None:
    assert _bfloat16(value) == bits


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_bfloat16_keeps_nan_and_its_sign(bits: int) -> None:
    rounded = int(to_bfloat16(np.array([bits], dtype=np.uint32).view(np.float32))[0])
    assert rounded & 0x7FFF > 0x7F80
    assert rounded >> 15 == bits >> 31


def test_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "rope_freqs.weight", ""])
def test_an_unknown_tensor_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"a tensor '{name}'"):
        hf_name(name)


# ---- the whole folder


def test_config_states_everything_the_file_states(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": 264,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 0}


def test_every_tensor_is_back_in_its_place(folder: Path, tiny_gguf: tuple[Path, Weights]) -> None:
    # Read by hand, as the format says: the header's length in 8 bytes, the header in JSON, the data.
    raw = (folder / "model.safetensors").read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data_start])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header.keys() == tiny_gguf[1].keys()
    for name, expected in tiny_gguf[1].items():
        assert header[name]["dtype"] == "BF16"
        assert header[name]["shape"] == list(expected.shape)
        begin, end = header[name]["data_offsets"]
        stored = np.frombuffer(raw[data_start + begin : data_start + end], dtype=np.uint16).reshape(expected.shape)
        assert np.array_equal(stored, to_bfloat16(expected)), name


def test_tokenizer_splits_digits_and_finds_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello hello").tokens == ["hello", "Ġhello"]
    assert tokenizer.encode("hello  12").tokens == ["hello", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|start|>hello<|end|>").ids == [1, 262 - 1, 0]
    text = "hello <|start|> 2024\n\té 日本 \U0001f680"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_config_names_special_tokens_and_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["bos_token"] == "<|start|>"
    assert config["eos_token"] == "<|end|>"
    assert "pad_token" not in config
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert config["model_max_length"] == 128


def test_the_same_file_gives_the_same_bytes(folder: Path, tiny_gguf: tuple[Path, Weights], tmp_path: Path) -> None:
    convert(tiny_gguf[0], tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "'gemma' model and only 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 16}, "rotates 16 of 32 dimensions"),
        ({"llama.block_count": ""}, "does not state llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count in the GGUF file is 'two' where an integer"),
        ({"llama.rope.freq_base": "hot"}, "llama.rope.freq_base in the GGUF file is 'hot' where a number"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' vocabulary"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokeniser 'tekken'"),
        ({"tokenizer.ggml.add_bos_token": True}, "asks for a BOS token"),
        ({"tokenizer.ggml.merges": ["lone"]}, "merge 'lone'"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "lists a token twice"),
        ({"tokenizer.ggml.merges": ["h q"]}, "merge 'h q' in the GGUF file is not of two of its tokens"),
        ({"tokenizer.ggml.tokens": ["h", "e", "he"], "tokenizer.ggml.merges": ["h e"]}, "264 types for 3 tokens"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id in the GGUF file is 9999"),
    ],
)
def test_what_cannot_be_converted_is_said(
    changes: Mapping[str, str | int | float | bool | list[str]], message: str, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    gguf = write_gguf(tmp_path / "changed.gguf", changes)
    with pytest.raises(ModelError, match=message):
        convert(gguf, tmp_path)


@pytest.mark.parametrize("size", [0, 3, 100, 5000, 30000])
def test_a_cut_file_is_an_error_of_ours(size: int, tiny_gguf: tuple[Path, Weights], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf[0].read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        convert(cut, tmp_path)


@pytest.mark.processes
def test_nothing_here_imports_torch() -> None:
    check = "import sys, cluster.models.pull, cluster.models.store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
