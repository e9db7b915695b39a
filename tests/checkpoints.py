"""Tiny random checkpoints of every supported architecture, in the format of a Hugging Face folder.

Weights are drawn wide (also norms and biases, which a fresh model leaves at 1 and 0), so that every tensor counts and
the margins between the best and the second best token are far above rounding errors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 320
EOS_IDS = (2, 3)
_SPREAD = 0.3
_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_IDS[0],
    "pad_token_id": 0,
}
# Each one shows what its family does differently: a head_dim of its own, tied embeddings, a window.
_ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 21, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def make_checkpoint(folder: Path, architecture: str, seed: int = 0, **overrides: object) -> Path:
    """Write a checkpoint of 2 layers, hidden 64, 4 heads over 2 kv heads, vocabulary 320; returns `folder`.

    `overrides` replace fields of the config. The same arguments give the same bytes. KeyError: unknown architecture.
    """
    config_class, model_class, special = _ARCHITECTURES[architecture]
    config = config_class(**(_SHAPE | special | overrides))
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _SPREAD
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.generation_config = GenerationConfig(eos_token_id=list(EOS_IDS))
    with _quiet():
        model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """The transformers model of `folder` in float32 with plain attention: the judge."""
    with _quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after every position: [len(tokens), vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars on the terminal while transformers loads or saves."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
