"""GGUF tensors -> `model.safetensors` in bfloat16, with numpy only.

1. name:        `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`
2. dequantise:  Q4_1, Q8_0, ... -> float32 (the `gguf` package)
3. unpermute:   the rows of q and k, which llama.cpp stores in another order
4. round:       float32 -> bfloat16
5. write:       all tensors, in the file's order

Shape legend: H heads, D head_dim, I input features. numpy has no bfloat16: here it is the uint16 of its bits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from gguf.quants import dequantize
from safetensors import TensorSpec, serialize_file

from cluster.core.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFReader, ReaderTensor
    from numpy.typing import NDArray

    from cluster.models.progress import Progress

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor of a `llama` file; raises `ModelError` for one it does not know."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _IN_BLOCK:
        raise ModelError(
            f"the GGUF file holds a tensor {gguf_name!r} that a llama model does not have; "
            "use the model's own Hugging Face folder"
        )
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put the rows of q (or k) back in Hugging Face order; `[H*D, I]` or `[H*D]` in and out.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates halves (0, D/2), (1, D/2+1), ... So the
    converter of llama.cpp interleaves the halves of every head (`LlamaModel.permute` in convert_hf_to_gguf.py), and
    this is the way back.
    """
    if rows.shape[0] % (2 * heads):
        raise ModelError(
            f"{rows.shape[0]} rows of q or k do not split into {heads} heads of an even size; the GGUF file is damaged"
        )
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even, as the bits of the result; same shape.

    A bfloat16 is the upper half of a float32. Adding 0x7FFF plus the lowest kept bit carries into the upper half
    exactly when the lower half is above the tie, or on it and the kept bit is odd. Infinities stay, and finite values
    too large for the format become infinite. NaN is set apart: the carry could run through its mantissa into the sign.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def write_tensors(reader: GGUFReader, target: Path, heads: int, kv_heads: int, progress: Progress) -> None:
    """Convert every tensor and write the safetensors file `target`. Peak memory: the whole model in bfloat16."""
    converted: dict[str, NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("convert", done, len(reader.tensors))
        name = hf_name(tensor.name)
        converted[name] = to_bfloat16(_dequantised(tensor, _permuted_heads(tensor.name, heads, kv_heads)))
    # The low-level writer, because safetensors.numpy takes the type from the array and numpy has no bfloat16. It reads
    # through the pointers, so `converted` must outlive the call.
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in converted.items()
    }
    serialize_file(specs, target, metadata={"format": "pt"})
    # safetensors makes the file 0600; a worker under another user must be able to read what the folder lets it see.
    target.chmod(target.parent.stat().st_mode & 0o666)
    progress("convert", len(reader.tensors), len(reader.tensors))


def _permuted_heads(gguf_name: str, heads: int, kv_heads: int) -> int | None:
    """How many heads the permuted rows of this tensor hold; None for a tensor stored as it is."""
    if ".attn_q." in gguf_name:
        return heads
    return kv_heads if ".attn_k." in gguf_name else None


def _dequantised(tensor: ReaderTensor, heads: int | None) -> NDArray[np.float32]:
    try:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ModelError(f"{tensor.name} in the GGUF file is stored as {tensor.tensor_type.name}: {error}") from error
    return values if heads is None else unpermute(values, heads)
