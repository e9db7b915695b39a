"""A Hugging Face folder's config.json, parsed once into an immutable value. No torch here.

Supported: Llama (SmolLM2 is one), Mistral, Qwen2 and Qwen3 for causal language modelling. What would change the numbers
and is not implemented is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from cluster.core.errors import ModelError
from engine.layout import KVLayout

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_Number = TypeVar("_Number", int, float)
_Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes in code rather than in config.json."""

    qkv_bias: bool | None  # None: config.attention_bias decides
    output_bias: bool | None
    mlp_bias: bool
    qk_norm: bool
    explicit_window: bool  # the window counts only when config.use_sliding_window is true


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, None, mlp_bias=True, qk_norm=False, explicit_window=True),
    "MistralForCausalLM": _Family(False, False, mlp_bias=False, qk_norm=False, explicit_window=False),
    "Qwen2ForCausalLM": _Family(True, False, mlp_bias=False, qk_norm=False, explicit_window=True),
    "Qwen3ForCausalLM": _Family(None, None, mlp_bias=False, qk_norm=True, explicit_window=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Fields that a kind does not use keep their defaults.

    `original_context` is the context the model was trained with, in tokens. `attention_factor` multiplies cos and sin.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`window`: a query at position p sees positions > p - window; None is full causal attention."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. `max_context` is in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    attention: AttentionConfig
    rope: RopeConfig
    rms_eps: float
    mlp_bias: bool
    tied_embeddings: bool
    max_context: int
    eos_ids: tuple[int, ...]

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """Its KV in blocks of `block_size` positions. Raises ConfigError for an impossible layout."""
        return KVLayout(self.layers, self.attention.kv_heads, self.attention.head_dim, block_size, dtype)


def load_config(folder: Path) -> ModelConfig:
    """Parse `folder`'s config.json and, where it exists, generation_config.json. Raises ModelError."""
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    return parse_config(raw, generation)


def parse_config(raw: _Json, generation: _Json) -> ModelConfig:
    """The typed form of the two files' contents. Raises ModelError that names the field."""
    architecture, family = _family(raw)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    max_context = _number(raw, "max_position_embeddings", int)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_number(raw, "vocab_size", int),
        hidden_size=_number(raw, "hidden_size", int),
        intermediate_size=_number(raw, "intermediate_size", int),
        layers=_number(raw, "num_hidden_layers", int),
        attention=_attention(raw, family),
        rope=_rope(raw, max_context),
        rms_eps=_number(raw, "rms_norm_eps", float, 1e-6),
        mlp_bias=family.mlp_bias and _flag(raw, "mlp_bias", default=False),
        tied_embeddings=_flag(raw, "tie_word_embeddings", default=False),
        max_context=max_context,
        eos_ids=_eos_ids(generation, raw),
    )


def _read_json(path: Path) -> _Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return cast("_Json", value)


def _family(raw: _Json) -> tuple[str, _Family]:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config.json: architectures must name exactly one, got {names!r}")
    family = _FAMILIES.get(names[0])
    if family is None:
        raise ModelError(f"architecture {names[0]!r} is not supported, only {', '.join(sorted(_FAMILIES))}")
    if raw.get("quantization_config") is not None:
        raise ModelError("config.json: quantization_config is set; quantised checkpoints are not supported")
    return str(names[0]), family


def _attention(raw: _Json, family: _Family) -> AttentionConfig:
    heads = _number(raw, "num_attention_heads", int)
    kv_heads = _number(raw, "num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    hidden_size = _number(raw, "hidden_size", int)
    head_dim = _number(raw, "head_dim", int, hidden_size // heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    bias = _flag(raw, "attention_bias", default=False)
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        qk_norm=family.qk_norm,
        window=_window(raw, family),
    )


def _window(raw: _Json, family: _Family) -> int | None:
    """One window for all layers or none; a window on some layers only is refused."""
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ModelError("config.json: layer_types other than full_attention are not supported")
    if family.explicit_window:
        if raw.get("sliding_window") is not None and _flag(raw, "use_sliding_window", default=False):
            raise ModelError("config.json: use_sliding_window (a window on some layers) is not supported")
        return None
    # Absent is not null: the family's own default is a window of 4096, so nothing may be assumed.
    if "sliding_window" not in raw:
        raise ModelError("config.json: sliding_window is missing")
    return None if raw["sliding_window"] is None else _number(raw, "sliding_window", int)


def _rope(raw: _Json, max_context: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older ones wrote `rope_theta` and `rope_scaling`."""
    value = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: rope_parameters / rope_scaling must be an object, got {value!r}")
    scaling = cast("dict[str, object]", value)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta_from = scaling if scaling.get("rope_theta") is not None else raw
    theta = _number(theta_from, "rope_theta", float, 10_000.0)
    for holder in (raw, scaling):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelError("config.json: partial_rotary_factor is not supported")
    match kind:
        case "default":
            return RopeConfig("default", theta)
        case "linear":
            return RopeConfig("linear", theta, _number(scaling, "factor", float))
        case "llama3":
            return RopeConfig(
                "llama3",
                theta,
                factor=_number(scaling, "factor", float),
                original_context=_number(scaling, "original_max_position_embeddings", int),
                low_freq_factor=_number(scaling, "low_freq_factor", float),
                high_freq_factor=_number(scaling, "high_freq_factor", float),
            )
        case "yarn":
            return _yarn(scaling, theta, max_context)
    raise ModelError(f"config.json: RoPE type {kind!r} is not supported, only default, linear, llama3, yarn")


def _yarn(scaling: _Json, theta: float, max_context: int) -> RopeConfig:
    for name in ("mscale", "mscale_all_dim"):
        if scaling.get(name) is not None:
            raise ModelError(f"config.json: yarn with {name} is not supported")
    factor = scaling.get("attention_factor")
    return RopeConfig(
        "yarn",
        theta,
        factor=_number(scaling, "factor", float),
        original_context=_number(scaling, "original_max_position_embeddings", int, max_context),
        beta_fast=_number(scaling, "beta_fast", float, 32.0),
        beta_slow=_number(scaling, "beta_slow", float, 1.0),
        truncate=_flag(scaling, "truncate", default=True),
        attention_factor=None if factor is None else _number(scaling, "attention_factor", float),
    )


def _eos_ids(generation: _Json, raw: _Json) -> tuple[int, ...]:
    """generation_config.json's ids first, then those only config.json names: any of them ends a text."""
    ids: dict[int, None] = {}
    for source in (generation, raw):
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise ModelError(f"eos_token_id {value!r} is not a token id or a list of them")
            ids[item] = None
    return tuple(ids)


def _number(raw: _Json, name: str, kind: type[_Number], default: _Number | None = None) -> _Number:
    """A positive number; null counts as missing. Raises ModelError when there is none and no default."""
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    allowed = (int,) if kind is int else (int, float)
    if not isinstance(value, allowed) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive {kind.__name__}, got {value!r}")
    return kind(value)


def _flag(raw: _Json, name: str, *, default: bool) -> bool:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} must be true or false, got {value!r}")
    return value
