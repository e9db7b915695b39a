"""From a model spec to a running model. torch is imported only for folders: the tracer does without."""

import dataclasses
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.core.errors import GrammarError, ModelError
from cluster.core.grammar import Vocabulary, folder_vocabulary, tracer_vocabulary
from engine.layout import CONVERTIBLE
from engine.messages import FolderModel, TracerModel
from engine.model.base import ForwardRow, Model
from engine.model.config import ModelConfig, load_config
from engine.pool import Convert, HostMemory, Memory, check_sizes

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


def load_model(spec: FolderModel | TracerModel, block_size: int, threads: int) -> Model:
    """Load `spec`'s model. `threads` bounds torch's CPU threads. Raises ModelError or ConfigError."""
    if isinstance(spec, TracerModel):
        from engine.model.tracer import TracerModelRunner

        return TracerModelRunner(spec, block_size)
    import torch

    from engine.model.llama import LlamaModel, MakeOperators
    from engine.model.native import NativeModel, unsupported
    from engine.model.operators import TorchOperators
    from engine.model.weights import Weights

    torch.set_num_threads(threads)
    folder = Path(spec.path).expanduser()
    config = _limit_context(load_config(folder), spec.max_context)
    kv_dtype = spec.kv_dtype or spec.dtype
    mark = _fingerprint(spec, config, kv_dtype, block_size, spec.converts_from)
    device = _device(spec.device)
    if spec.converts_from and device.type == "cuda":
        raise ModelError(f"handoff.convert is kv_dtype, but the device is {device}: only CPUs convert")
    kernels = spec.kernels
    if kernels == "auto" and device.type == "cuda":
        kernels = "triton" if find_spec("triton") and kv_dtype == spec.dtype else "torch"
    if device.type == "cuda":
        reason: str | None = f"engine.device is {device}"
    elif kernels in ("torch", "triton"):
        reason = f"engine.kernels is {kernels}"
    else:
        reason = unsupported(config, spec.dtype, block_size, spec.quantization, kv_dtype)
    if reason is not None and spec.kernels == "native":
        raise ModelError(f"engine.kernels is native, but this model cannot run in native code: {reason}")
    operators: MakeOperators = TorchOperators
    if kernels == "triton":
        if kv_dtype != spec.dtype:
            raise ModelError(f"engine.kernels is triton, which keeps KV in engine.dtype {spec.dtype}, not {kv_dtype}")
        from engine.gpu.operators import TritonOperators

        operators = TritonOperators
    with Weights(folder, config, spec.dtype, spec.quantization, device) as weights:
        if reason is None:
            return NativeModel(config, weights, block_size, mark, threads, kv_dtype=kv_dtype)
        return LlamaModel(config, weights, block_size, mark, operators, kv_dtype=kv_dtype)


def sources(spec: FolderModel | TracerModel, block_size: int) -> dict[str, bytes]:
    """Fingerprints of the workers whose blocks are converted, by their KV dtype: what they must say they are.

    Raises ModelError.
    """
    if isinstance(spec, TracerModel) or not spec.converts_from:
        return {}
    config = load_config(Path(spec.path).expanduser())
    return {spec.converts_from: _fingerprint(spec, config, spec.converts_from, block_size)}


def _fingerprint(
    spec: FolderModel, config: ModelConfig, kv_dtype: str, block_size: int, converted_from: str = ""
) -> bytes:
    from engine.model.weights import fingerprint, kv_kind

    kind = kv_kind(spec.dtype, kv_dtype, converted_from)
    return fingerprint(Path(spec.path).expanduser(), config, kind, block_size, spec.quantization)


def make_memory(
    model: Model, num_blocks: int, slots: int, slot_bytes: int, *, poison: bool, source: str = ""
) -> Memory:
    """An engine's memory where its model runs, and the model bound to it. Raises ConfigError for impossible sizes.

    `poison`: all of it is NaN bytes at first. `source`: the KV dtype of blocks that are to be converted; slots hold
    them as they come.
    """
    if source:
        check_sizes(dataclasses.replace(model.layout, dtype=source), num_blocks, slots, slot_bytes)
    if model.device == "cpu":
        host = HostMemory(model.layout, num_blocks, slots, slot_bytes, converter(model))
        if poison:
            host.poison_all()
        model.bind(host.pool)
        return host
    import torch

    from engine.gpu.memory import DeviceMemory
    from engine.model.llama import LlamaModel

    if not isinstance(model, LlamaModel):
        raise ModelError(f"{type(model).__name__} says that it runs on {model.device}")
    device = DeviceMemory(model.layout, num_blocks, slots, slot_bytes, torch.device(model.device))
    if poison:
        device.poison_all()
    model.bind(device.blocks)
    warm_up(model)
    return device


def converter(model: Model) -> Convert | None:
    """How blocks of another KV dtype become this model's. None: they cannot."""
    if model.layout.dtype not in CONVERTIBLE:
        return None
    from engine.model.kv_codec import convert

    return convert


def warm_up(model: Model) -> None:
    """Run what a step can be made of, without writing, so that kernels are compiled before Ready says so."""
    prompt = ForwardRow([0, 0], 0, [0], write=False, logits=True)
    token = ForwardRow([0], 0, [0], write=False, logits=True)
    for rows in ([prompt], [token], [prompt, token]):
        model.run(rows)


def _device(name: str) -> "torch.device":
    """Raises ModelError for a GPU that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise ModelError(f"engine.device is {name}, but torch finds {count} GPUs")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # Triton starts kernels on the thread's own device
    return device


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
