"""Compile every Triton kernel for GPUs that are not here; a JSON line each. Run without TRITON_INTERPRET.

The compiler and its assembler come with Triton; only running what they make needs a GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.gpu.kernels import attention, digest, heads
from engine.layout import KVLayout

CAPABILITIES = (80, 90)
LAYOUTS = [("bfloat16", dim) for dim in (64, 80, 96, 128, 256)] + [("float16", 128), ("float32", 128), ("float32", 256)]
TRITON_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
INTS = ("rows", "first_tokens", "starts", "counts", "tables", "tile_rows", "tile_firsts", "slots", "targets", "sources")
FLOATS = ("values", "tops", "sums", "cos", "sin")
WORDS = ("sums", "target", "source", "weight")
ALIGNED = ("block_stride", "head_stride")


def kernels() -> Iterator[tuple[object, str, Mapping[str, object]]]:
    """Kernel, dtype, and what is known when it is compiled, as its launch function says it."""
    for dtype, dim in LAYOUTS:
        tile = attention.tile_shape(KVLayout(1, 8, dim, 16, dtype))
        sizes = {"A": 32, "D": dim, "BLOCK_D": triton.next_power_of_2(dim)}
        page = sizes | {"G": 4, "PAGE": 16, "N": tile.positions}
        yield attention._decode, dtype, page | {"M": 16, "MIN": tile.span, "MAX": tile.spans}
        yield attention._prefill, dtype, page | {"M": tile.queries}
        yield attention._merge, dtype, sizes | {"MIN": tile.span, "MAX": tile.spans}
        for norms in (False, True):
            yield heads._heads, dtype, sizes | {"K": 8, "PAGE": 16, "V": 8, "NORMS": norms}
        yield heads._add_norm, dtype, {"E": 4096, "BLOCK_E": 4096, "ADDS": True}
    for copies in (False, True):
        yield digest._digest, "int64", {"COPIES": copies, "W": 2048}


def kind(name: str, dtype: str) -> str:
    """The type of an argument, in Triton's words."""
    if dtype == "int64":
        return "i32" if name == "words" else "*i64"
    if name in INTS:
        return "*i64"
    if name in FLOATS or name == "x":
        return "*fp32"
    if name in ("eps", "scale"):
        return "fp32"
    if name in ("q", "pool", "out", "qkv", "norm", "delta", "weight"):
        return "*" + TRITON_NAMES[dtype]
    return "i64" if name == "block_stride" else "i32"


def spilled(assembly: str, capability: int) -> int:
    """Bytes of registers that a program keeps in memory, as the assembler counts them."""
    assembler = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly)
        file.flush()
        arch = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(assembler), "-v", arch, file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"(\d+) bytes spill stores", done.stderr))


def main() -> None:
    for capability in CAPABILITIES:
        for kernel, dtype, known in kernels():
            names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
            signature = {name: "constexpr" if name in known else kind(name, dtype) for name in names}
            aligned = {
                (place,): [["tt.divisibility", 16]]
                for place, name in enumerate(names)
                if signature[name].startswith("*") or name in ALIGNED
            }
            source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in known.items()}, aligned)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            line = {"kernel": kernel.__name__, "dtype": dtype, "capability": capability}  # type: ignore[attr-defined]
            line |= {"shared": made.metadata.shared, "spilled": spilled(made.asm["ptx"], capability)}
            sys.stdout.write(json.dumps(line | {"head_dim": known.get("D", 0)}) + "\n")


if __name__ == "__main__":
    main()
