"""config.json, in the spellings of several years, becomes one typed value or a ModelError that names the field."""

import json
from pathlib import Path

import pytest

from cluster.core.errors import ModelError
from engine.model.config import RopeConfig, load_config, parse_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_a_plain_llama() -> None:
    config = parse_config(LLAMA, {})
    assert (config.layers, config.hidden_size, config.max_context, config.rms_eps) == (2, 64, 512, 1e-5)
    assert (config.attention.heads, config.attention.kv_heads, config.attention.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig("default", 10_000.0)
    assert not config.tied_embeddings
    assert not config.attention.qkv_bias


def test_what_each_family_fixes_in_code() -> None:
    mistral, qwen2, qwen3 = (parse_config(raw, {}).attention for raw in (MISTRAL, QWEN2, QWEN3))
    assert (mistral.qkv_bias, mistral.output_bias, mistral.qk_norm, mistral.window) == (False, False, False, None)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.window) == (True, False, False, None)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 32)
    llama = parse_config(LLAMA | {"attention_bias": True, "mlp_bias": True}, {})
    assert (llama.attention.qkv_bias, llama.attention.output_bias, llama.mlp_bias) == (True, True, True)
    assert parse_config(MISTRAL | {"sliding_window": 128}, {}).attention.window == 128


def test_missing_kv_heads_means_one_per_head() -> None:
    raw = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert parse_config(raw, {}).attention.kv_heads == 4


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}, "rope_scaling": None},
    ],
)
def test_old_and_new_spellings_of_rope_are_the_same(raw: dict[str, object]) -> None:
    assert parse_config(LLAMA | raw, {}).rope == RopeConfig("llama3", 5e5, 8.0, 64, 1.0, 4.0)


def test_other_rope_kinds() -> None:
    linear = parse_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}, {}).rope
    assert linear == RopeConfig("linear", 10_000.0, 2.0)
    yarn = parse_config(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}}, {}).rope
    assert yarn == RopeConfig("yarn", 10_000.0, 4.0, original_context=512, beta_fast=16.0)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        ([5, 2], 2, (5, 2)),
        (7, [2, 3], (7, 2, 3)),
        (7, None, (7,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_both_files(generation: object, config: object, expected: tuple[int, ...]) -> None:
    assert parse_config(LLAMA | {"eos_token_id": config}, {"eos_token_id": generation}).eos_ids == expected


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                  "num_attention_heads", "max_position_embeddings"])  # fmt: skip
@pytest.mark.parametrize("value", ["missing", None, 0, -4, 1.5, "64", True])
def test_a_missing_or_impossible_number_is_named(name: str, value: object) -> None:
    raw = {key: item for key, item in LLAMA.items() if key != name}
    with pytest.raises(ModelError, match=name):
        parse_config(raw if value == "missing" else raw | {name: value}, {})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported, only Llama"),
        (LLAMA | {"architectures": []}, "architectures must name exactly one"),
        (LLAMA | {"architectures": None}, "architectures must name exactly one"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (LLAMA | {"head_dim": 15}, "head_dim 15 is odd"),
        (LLAMA | {"attention_bias": "yes"}, "attention_bias must be true or false"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": None}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        (LLAMA | {"rope_scaling": [2.0]}, "must be an object"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id"),
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, "sliding_window is missing"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(raw, {})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="does not hold a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert load_config(tmp_path).eos_ids == (9, 2)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*generation_config\.json"):
        load_config(tmp_path)
