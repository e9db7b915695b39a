"""GGUF metadata -> `config.json` and `generation_config.json`.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (GGUF side) and `LlamaConfig` in transformers
(Hugging Face side). What the file states is written even where it equals a default over there: defaults change
between versions of a library, a checkpoint does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cluster.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.models.gguf_metadata import Metadata

ConfigValue = bool | int | float | str | list[str] | None
Config = dict[str, ConfigValue]

ARCHITECTURE = "llama"


def llama_config(metadata: Metadata, tensor_names: Collection[str]) -> Config:
    """The `LlamaConfig` fields of this file.

    `tensor_names` are GGUF's: a file without `output.weight` ties the output projection to the embedding. Raises
    `ModelError` for another architecture and for RoPE scalings, which these files describe only in part.
    """
    _check_supported(metadata, tensor_names)
    hidden = metadata.integer("llama.embedding_length")
    heads, kv_heads = head_counts(metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(metadata, hidden, heads),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rms_norm_eps": shortest_float(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_float(_number_or(metadata, "llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensor_names),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensor_names),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "vocab_size": vocab_size(metadata),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **special_ids(metadata),
    }


def generation_config(metadata: Metadata) -> Config:
    """What `generate` needs to know: where a sequence starts, ends and how it is padded."""
    return {"_from_model_config": True, **special_ids(metadata)}


def head_counts(metadata: Metadata) -> tuple[int, int]:
    """Query heads and kv heads; a file that does not state the latter has no grouping."""
    heads = metadata.integer("llama.attention.head_count")
    return heads, _integer_or(metadata, "llama.attention.head_count_kv", heads)


def special_ids(metadata: Metadata) -> Config:
    """The bos, eos and pad ids the file states; an id it does not state is left out."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {field: f"tokenizer.ggml.{name}_token_id" for field, name in names.items()}
    return {field: metadata.integer(key) for field, key in keys.items() if key in metadata}


def vocab_size(metadata: Metadata) -> int:
    """Rows of the embedding: stated, or else one for each token."""
    if "llama.vocab_size" in metadata:
        return metadata.integer("llama.vocab_size")
    return len(metadata.texts("tokenizer.ggml.tokens"))


def shortest_float(value: float) -> float:
    """The shortest decimal that is the same float32.

    GGUF keeps 1e-05 as a float32, which reads back as 9.999999747378752e-06; the model was published with 1e-05.
    """
    return float(str(np.float32(value)))


def _check_supported(metadata: Metadata, tensor_names: Collection[str]) -> None:
    architecture = metadata.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"the GGUF file holds a {architecture!r} model and only {ARCHITECTURE!r} can be converted; "
            "use the model's own Hugging Face folder"
        )
    key = "llama.rope.scaling.type"
    scaling = metadata.text(key) if key in metadata else "none"
    if scaling != "none" or "rope_freqs.weight" in tensor_names:
        raise ModelError(
            f"the GGUF file scales its RoPE ({key} is {scaling!r}), which cannot be converted back exactly; "
            "use the model's own Hugging Face folder"
        )


def _head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    head_dim = _integer_or(metadata, "llama.attention.key_length", hidden // max(heads, 1))
    rotary = _integer_or(metadata, "llama.rope.dimension_count", head_dim)
    if rotary != head_dim or head_dim < 2 or head_dim % 2:
        raise ModelError(
            f"the GGUF file rotates {rotary} of {head_dim} dimensions of a head (llama.rope.dimension_count); "
            "only whole heads of an even size can be converted; use the model's own Hugging Face folder"
        )
    return head_dim


def _integer_or(metadata: Metadata, key: str, default: int) -> int:
    return metadata.integer(key) if key in metadata else default


def _number_or(metadata: Metadata, key: str, default: float) -> float:
    return metadata.number(key) if key in metadata else default
