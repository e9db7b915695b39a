"""From a model spec to a running model. torch is imported only for folders: the tracer does without."""

import dataclasses
import logging
from pathlib import Path

from cluster.core.errors import GrammarError, ModelError
from cluster.core.grammar import Vocabulary, folder_vocabulary, tracer_vocabulary
from engine.messages import FolderModel, TracerModel
from engine.model.base import Model
from engine.model.config import ModelConfig, load_config

_log = logging.getLogger(__name__)


def load_model(spec: FolderModel | TracerModel, block_size: int, threads: int) -> Model:
    """Load `spec`'s model. `threads` bounds torch's CPU threads. Raises ModelError or ConfigError."""
    if isinstance(spec, TracerModel):
        from engine.model.tracer import TracerModelRunner

        return TracerModelRunner(spec, block_size)
    import torch

    from engine.model.llama import LlamaModel
    from engine.model.native import NativeModel, unsupported
    from engine.model.weights import Weights, fingerprint

    torch.set_num_threads(threads)
    folder = Path(spec.path).expanduser()
    config = _limit_context(load_config(folder), spec.max_context)
    mark = fingerprint(folder, config, spec.dtype, block_size, spec.quantization)
    reason = (
        "engine.kernels is torch"
        if spec.kernels == "torch"
        else unsupported(config, spec.dtype, block_size, spec.quantization)
    )
    if reason is not None and spec.kernels == "native":
        raise ModelError(f"engine.kernels is native, but this model cannot run in native code: {reason}")
    with Weights(folder, config, spec.dtype, spec.quantization) as weights:
        if reason is None:
            return NativeModel(config, weights, block_size, mark, threads)
        return LlamaModel(config, weights, block_size, mark)


def load_vocabulary(spec: FolderModel | TracerModel, model: Model) -> Vocabulary | None:
    """What `model` can write, for its grammars; None: its folder does not say, and then it has none."""
    if isinstance(spec, TracerModel):
        return tracer_vocabulary(model.vocab_size)
    try:
        return folder_vocabulary(Path(spec.path).expanduser(), model.vocab_size, model.eos_ids)
    except GrammarError as error:
        _log.warning("no grammars: %s", error)
        return None


def _limit_context(config: ModelConfig, limit: int | None) -> ModelConfig:
    if limit is None:
        return config
    if not 0 < limit <= config.max_context:
        raise ModelError(f"max_context {limit} is not within the model's {config.max_context} positions")
    return dataclasses.replace(config, max_context=limit)
