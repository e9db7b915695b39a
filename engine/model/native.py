"""The same decoders as engine/model/llama.py, whole forward in native code: bfloat16 on CPUs with AVX-512 BF16 or AMX.

The library (engine/native/) is built at install where there is a compiler for it, and used where the CPU can run it;
anywhere else the torch model serves. Its results do not depend on what else is in a step: a sequence's tokens are the
same alone, in any batch and in any chunking (DESIGN I5), bit for bit on one kind of CPU.

Weights are packed once into the order that the products read them in; activations are bfloat16, KV as well or int8 with
scales, sums and the residual stream float32.

Shapes: T tokens of the step, R rows, E hidden size, D head_dim, V vocabulary, L rows that want logits.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.model.attention import PagedKV, check_rows
from engine.model.base import ForwardRow, OnLogits, check_tokens, ignore_logits, scored_pieces
from engine.model.config import ModelConfig
from engine.model.quantise import BITS, GROUP, HEAD_BITS, Quantization, quantise
from engine.model.rope import Rope
from engine.model.weights import Weights
from engine.pages import allocate

LIBRARY = Path(__file__).parents[1] / "native" / "_forward"
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi"})
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
PHASES = ("norm", "qkv", "heads", "attention", "output", "gate_up", "down", "head")
_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20  # of packed weights that lie together
_PANEL = 32  # outputs packed together
_STEP = 32  # inputs multiplied at once
_TILE = 16
_LONGEST_LINE = 1024  # of KV in int8, as in forward.cpp


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "bits")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("qkv", _Linear),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("output", _Linear),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", _Linear),
        ("down", _Linear),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("intermediate", "vocab", "block_size", "window")),
        ("eps", ctypes.c_float),
        ("amx", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("kv_item_bytes", ctypes.c_int32),
        ("embedding", ctypes.c_void_p),
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
        ("pool", ctypes.c_void_p),
    )


class _Row(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("first_token", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("start", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "wanted")),
        *((name, ctypes.c_void_p) for name in ("token", "cos", "sin")),
        ("row", ctypes.POINTER(_Row)),
        *((name, ctypes.c_void_p) for name in ("write", "last", "logits")),
    )


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What this CPU can do, in Linux's words; nothing on other systems."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


@cache
def library() -> ctypes.CDLL | None:
    """The native code, where it was built and this CPU can run it."""
    if not cpu_flags() >= NEEDED:
        return None
    built = [LIBRARY.with_name(LIBRARY.name + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in built if path.exists()), None)
    if path is None:
        return None
    code = ctypes.CDLL(str(path))
    code.hr_pack.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    code.hr_pack_quantised.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p
    ]  # fmt: skip
    code.hr_pack.restype = code.hr_pack_quantised.restype = None
    code.hr_forward.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Step)]
    code.hr_logits.argtypes = [ctypes.POINTER(_Model), ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    code.hr_logits.restype = None
    code.hr_spent.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
    code.hr_spent.restype = None
    code.hr_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    code.hr_read.restype = code.hr_cycles.restype = ctypes.c_uint64
    return code


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 tiles and the system lets this process do so."""
    code = library()
    return code is not None and cpu_flags() >= AMX and bool(code.hr_use_amx())


def unsupported(
    config: ModelConfig,
    dtype: str,
    block_size: int,
    quantization: Quantization = "none",
    kv_dtype: str = "bfloat16",
) -> str | None:
    """Why this model cannot run in native code, or None."""
    if dtype != "bfloat16":
        return f"dtype is {dtype}, native code has bfloat16 alone"
    if kv_dtype not in ("bfloat16", "int8"):
        return f"KV is stored in {kv_dtype}, native code has bfloat16 and int8"
    if kv_dtype == "int8" and config.attention.head_dim > _LONGEST_LINE:
        return f"head_dim {config.attention.head_dim} is above {_LONGEST_LINE}, with KV in int8"
    products = _STEP if quantization == "none" else GROUP
    for name, value, unit in (
        ("heads x head_dim", config.attention.heads * config.attention.head_dim, products),
        ("head_dim", config.attention.head_dim, _STEP),
        ("hidden_size", config.hidden_size, products),
        ("intermediate_size", config.intermediate_size, products),
        ("block_size", block_size, _TILE),
    ):
        if value % unit:
            return f"{name} {value} is no multiple of {unit}"
    if not cpu_flags() >= NEEDED:
        return f"the CPU lacks {', '.join(sorted(NEEDED - cpu_flags()))}"
    if library() is None:
        return "it was not built when Headrace was installed: that needs a C++ compiler"
    return None


class NativeModel:
    """A decoder with its weights packed in memory; implements `base.Model`. One caller at a time in a process."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        block_size: int,
        fingerprint: bytes,
        threads: int,
        *,
        amx: bool | None = None,
        kv_dtype: str = "bfloat16",
    ) -> None:
        """Copies what it needs out of `weights`. `amx` None: where the CPU has it. Raises ModelError, ConfigError."""
        code = library()
        if (
            reason := unsupported(config, weights.dtype_name, block_size, weights.quantization, kv_dtype)
        ) is not None or code is None:
            raise ModelError(f"no native code for this model: {reason}")
        attention = config.attention
        self.layout = config.kv_layout(block_size, kv_dtype)
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.eos_ids = config.eos_ids
        self.fingerprint = fingerprint
        self.device = "cpu"
        self._code = code
        self._rope = Rope(config.rope, attention.head_dim)
        self._kv: PagedKV | None = None
        packer = _Packer(code, weights)
        embedding = packer.keep(weights.take("model.embed_tokens.weight"))
        head = embedding if config.tied_embeddings else weights.take("lm_head.weight")
        self._layers = (_Layer * config.layers)(*(_load_layer(config, packer, i) for i in range(config.layers)))
        self._model = _Model(
            layers=config.layers,
            hidden=config.hidden_size,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            block_size=block_size,
            window=attention.window or 0,
            eps=config.rms_eps,
            amx=int(has_amx() if amx is None else amx),
            threads=threads,
            kv_item_bytes=self.layout.item_bytes,
            embedding=embedding.data_ptr(),
            layer=self._layers,
            norm=packer.floats(["model.norm.weight"]),
            head=packer.pack(head, HEAD_BITS[weights.quantization]),
        )
        self._kept = packer.kept
        self.weight_bytes = packer.size
        """What the packed weights, scales and the embedding take."""

    def bind(self, pool: NDArray[np.uint8]) -> None:
        """Use `pool`, uint8 [num_blocks, block_bytes], for KV from now on. Raises ModelError when it does not fit."""
        self._kv = PagedKV(pool, self.layout)
        self._model.pool = self._kv.pages_MX.data_ptr()

    @torch.inference_mode()
    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        """One forward for all rows. Returns logits float32 [L, V] of the rows with `logits`, in row order.

        Raises ModelError for a row that cannot be run, MemoryError; nothing has been written then.
        """
        if self._kv is None:
            raise ModelError("the model has no pool yet: bind one first")
        wanted = sum(row.logits for row in rows)
        logits = np.empty((wanted, self.vocab_size), dtype=np.float32)
        if not rows:
            return logits
        check_tokens(rows, self.vocab_size, self.max_context)
        check_rows(rows, self._kv)
        tokens = np.array([token for row in rows for token in row.tokens], dtype=np.int64)
        lengths = [len(row.tokens) for row in rows]
        firsts = np.cumsum(lengths) - lengths
        positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in rows])
        cos, sin = self._rope.angles(torch.from_numpy(positions))
        tables = [np.array(row.table, dtype=np.int64) for row in rows]
        write = np.array([row.write for row in rows], dtype=np.uint8)
        last = (firsts + lengths - 1)[[row.logits for row in rows]]
        native_rows = (_Row * len(rows))(
            *(
                _Row(table.ctypes.data, int(first), len(row.tokens), row.start)
                for table, first, row in zip(tables, firsts, rows, strict=True)
            )
        )
        step = _Step(
            tokens=len(tokens),
            rows=len(rows),
            wanted=wanted,
            token=tokens.ctypes.data,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            row=native_rows,
            write=write.ctypes.data,
            last=last.ctypes.data,
            logits=logits.ctypes.data,
        )
        if self._code.hr_forward(self._model, step):
            raise MemoryError(f"no memory for a step of {len(tokens)} tokens")
        for scored in scored_pieces(rows):
            piece = np.empty((len(scored), self.vocab_size), dtype=np.float32)
            self._code.hr_logits(self._model, scored.ctypes.data, len(scored), piece.ctypes.data)
            on_logits(piece)
        return logits

    def spent(self) -> dict[str, int]:
        """Cycles of the time stamp counter that every phase has taken in this process so far."""
        cycles = (ctypes.c_uint64 * len(PHASES))()
        self._code.hr_spent(cycles)
        return dict(zip(PHASES, cycles, strict=True))


class _Packer:
    """Turns tensors into what the native code reads, and keeps their memory alive."""

    def __init__(self, code: ctypes.CDLL, weights: Weights) -> None:
        self.kept: list[torch.Tensor | NDArray[np.uint8]] = []
        self.size = 0
        self._free = np.empty(0, dtype=np.uint8)
        self._code = code
        self._weights = weights

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append(tensor)
        self.size += tensor.nbytes
        return tensor

    def floats(self, names: Sequence[str], *, interleave: bool = False) -> int:
        """Address of the joined vectors in float32."""
        vector = torch.cat([self._weights.take(name).float() for name in names])
        if interleave:
            vector = vector.view(2, -1, _TILE).transpose(0, 1).reshape(-1)
        return self.keep(vector.contiguous()).data_ptr()

    def pack(self, weight_OI: torch.Tensor, bits: int, bias: int | None = None, *, interleave: bool = False) -> _Linear:
        """A product's weight in panels of so many bits."""
        outputs, inputs = weight_OI.shape
        address = self._memory(-(-outputs // _PANEL) * _PANEL * inputs * bits // 8)
        if bits == 16:
            self._code.hr_pack(weight_OI.data_ptr(), outputs, inputs, int(interleave), address)
            return _Linear(address, None, bias, inputs, outputs, bits)
        q_OI, scale = quantise(weight_OI, bits)
        self._code.hr_pack_quantised(q_OI.data_ptr(), outputs, inputs, int(interleave), bits, address)
        return _Linear(address, self._scales(scale, interleave=interleave), bias, inputs, outputs, bits)

    def _scales(self, scale_OG: torch.Tensor, *, interleave: bool) -> int:
        """Scales in the order of the panels: [panels, G, 32].

        Without their last two bits (of 24): so their products with 1.5 x 2^23 are exact (quantised_products.h).
        """
        outputs, groups = scale_OG.shape
        scale_OG = (scale_OG.contiguous().view(torch.int32) & ~3).view(torch.float32)
        if interleave:
            scale_OG = scale_OG.view(2, -1, _TILE, groups).transpose(0, 1).reshape(outputs, groups)
        padded = torch.nn.functional.pad(scale_OG, (0, 0, 0, -outputs % _PANEL))
        return self.keep(padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous()).data_ptr()

    def _memory(self, size: int) -> int:
        """Of this many bytes, right behind what was asked for before: a step reads all of them in that order."""
        if self._free.nbytes < size:
            self._free = allocate(max(size, _CHUNK_BYTES))
            self.kept.append(self._free)
        self.size += size
        memory, self._free = self._free[:size], self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return int(memory.ctypes.data)

    def linear(self, prefix: str, names: Sequence[str], *, bias: bool, interleave: bool = False) -> _Linear:
        """Several weights that read the same input, joined into one product."""
        weight_OI = torch.cat([self._weights.take(f"{prefix}{name}.weight") for name in names])
        biases = [f"{prefix}{name}.bias" for name in names]
        address = self.floats(biases, interleave=interleave) if bias else None
        return self.pack(weight_OI, BITS[self._weights.quantization], address, interleave=interleave)


def _load_layer(config: ModelConfig, packer: _Packer, index: int) -> _Layer:
    prefix, attention = f"model.layers.{index}.", config.attention
    q_norm, k_norm = (
        packer.floats([f"{prefix}self_attn.{name}_norm.weight"]) if attention.qk_norm else None for name in "qk"
    )
    return _Layer(
        attention_norm=packer.floats([prefix + "input_layernorm.weight"]),
        qkv=packer.linear(prefix, [f"self_attn.{name}_proj" for name in "qkv"], bias=attention.qkv_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        output=packer.linear(prefix, ["self_attn.o_proj"], bias=attention.output_bias),
        mlp_norm=packer.floats([prefix + "post_attention_layernorm.weight"]),
        gate_up=packer.linear(prefix, ["mlp.gate_proj", "mlp.up_proj"], bias=config.mlp_bias, interleave=True),
        down=packer.linear(prefix, ["mlp.down_proj"], bias=config.mlp_bias),
    )
