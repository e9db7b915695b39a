"""A checkpoint's tensors: the safetensors files of a Hugging Face folder, checked against the config before loading.

Files are memory-mapped; `take` copies one tensor out in the wanted dtype, so loading never holds the model twice.
"""

import hashlib
import json
import struct
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from cluster.core.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.dtypes import TORCH_DTYPES
from engine.model.quantise import BITS, Quantization, rounded

SAMPLES = 64
SAMPLE_BYTES = 1 << 20
_FINGERPRINT_BYTES = 16
_LISTED = 5  # names shown of a long list


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of `config` holds, by its Hugging Face name."""
    hidden, inner, attention = config.hidden_size, config.intermediate_size, config.attention
    q_size, kv_size = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", q_size, hidden, attention.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, attention.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, attention.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, attention.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if attention.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (attention.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (attention.head_dim,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


class Weights:
    """The open checkpoint. A context manager: on leaving, the maps are released and their pages leave the RSS."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: str,
        quantization: Quantization = "none",
        device: torch.device | None = None,
    ) -> None:
        """Open and check. `device`: where tensors are taken to, None: the CPU.

        Raises ModelError naming tensors that are missing, unexpected or of another shape.
        """
        if dtype not in TORCH_DTYPES:
            raise ModelError(f"dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
        self.dtype_name = dtype
        self.quantization: Quantization = quantization
        self.device = device or torch.device("cpu")
        self._dtype = TORCH_DTYPES[dtype]
        self._files = ExitStack()
        self._holder: dict[str, safe_open] = {}
        try:
            for path in weight_files(folder):
                handle = self._files.enter_context(safe_open(path, framework="pt"))
                for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name in self._holder:
                        raise ModelError(f"{path}: tensor {name} is in another file too")
                    self._holder[name] = handle
            self._check(config)
        except (OSError, SafetensorError) as error:
            self._files.close()
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
        except ModelError:
            self._files.close()
            raise

    def take(self, name: str) -> torch.Tensor:
        """A private copy of one tensor, in the dtype asked for at construction. Raises ModelError."""
        handle = self._holder.get(name)
        if handle is None:
            raise ModelError(f"tensor {name} is not in the checkpoint")
        tensor: torch.Tensor = handle.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.to(self.device, self._dtype, copy=True).contiguous()

    def take_product(self, name: str) -> torch.Tensor:
        """The weight of a layer's product, as far as quantization leaves it. Raises ModelError."""
        return rounded(self.take(name), BITS[self.quantization])

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.clear()
        self._files.close()

    def _check(self, config: ModelConfig) -> None:
        expected = expected_shapes(config)
        if missing := sorted(expected.keys() - self._holder.keys()):
            raise ModelError(f"tensors missing in the checkpoint: {_listing(missing)}")
        # Old exporters stored the rotary table, and some store a tied lm_head as well: both are derived from the rest.
        extra = [name for name in self._holder.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq")]
        if config.tied_embeddings and "lm_head.weight" in extra:
            extra.remove("lm_head.weight")
        if extra:
            raise ModelError(f"unexpected tensors in the checkpoint: {_listing(sorted(extra))}")
        for name, shape in expected.items():
            view = self._holder[name].get_slice(name)  # type: ignore[no-untyped-call]
            found = tuple(view.get_shape())
            if found != shape:
                raise ModelError(f"tensor {name} has shape {list(found)}, the config says {list(shape)}")


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files by name: those the index lists, else model.safetensors. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).exists():
            raise ModelError(f"{index} lists {name!r}, which is not a file of this folder")
    return [folder / name for name in names]


def kv_kind(dtype: str, kv_dtype: str, converted_from: str = "") -> str:
    """How KV comes about, for its fingerprint: the dtype it is stored in and the one it is computed in.

    What a worker may have converted from another dtype is never taken for what it would have computed.
    """
    kind = kv_dtype if kv_dtype == dtype else f"{kv_dtype} of {dtype}"
    return f"{kind}, or converted from {converted_from}" if converted_from else kind


def fingerprint(
    folder: Path, config: ModelConfig, kv_kind: str, block_size: int, quantization: Quantization = "none"
) -> bytes:
    """blake2b-128 over what changes KV bytes (DESIGN §4.2).

    Safetensors headers, sizes and 64 fixed samples of 1 MB a file, the model config without what only ends a text
    (context, eos), kind of KV, block size, quantization. Every part is length-prefixed. Raises ModelError.
    """
    digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES, person=b"headrace-model")

    def add(part: bytes) -> None:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)

    shape = (
        config.architecture,
        (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers),
        config.attention,
        config.rope,
        (config.rms_eps, config.mlp_bias, config.tied_embeddings),
    )
    add(repr(shape).encode())
    add(kv_kind.encode())
    add(struct.pack("<Q", block_size))
    if quantization != "none":
        add(quantization.encode())
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                header_size = struct.unpack("<Q", file.read(8))[0]
                size = path.stat().st_size
                add(struct.pack("<Q", size))
                add(file.read(min(header_size, size)))
                for offset in sample_offsets(size):
                    file.seek(offset)
                    add(file.read(SAMPLE_BYTES))
        except (OSError, struct.error) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    return digest.digest()


def sample_offsets(size: int) -> list[int]:
    """Where the samples of a file of `size` bytes start: evenly spread, the last one ends with the file.

    A file of at most 64 MB is covered whole.
    """
    if size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [(size - SAMPLE_BYTES) * index // (SAMPLES - 1) for index in range(SAMPLES)]


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
