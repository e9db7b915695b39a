"""What a block looks like in memory, as a value that two workers can compare (FAULTS C06, C07, F08).

The pool is one array `[num_blocks, kv_heads, layers, 2, page]`: a block is one contiguous range, and so is every kv
head of it. K is index 0 of the axis of length 2, V is index 1. A *page* is `[block_size, head_dim]` values; those of
int8 are followed by `[block_size]` float32 scales, one for each vector, so that a block brings its scales wherever it
goes (docs/decisions/0019-kv-int8.md).
"""

from dataclasses import dataclass

from cluster.core.digest import WORD
from cluster.core.errors import ConfigError
from cluster.core.kv_dtypes import ITEM_BYTES, SCALE_BYTES

CONVERTIBLE = frozenset({"float32", "bfloat16", "float16", "int8"})  # one into the other; int64 is the tracer's


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block. Two workers may exchange KV only when their layouts are equal."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not one of {sorted(ITEM_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV layout: {name} is {getattr(self, name)}, must be at least 1")
        if self.scale_bytes and self.block_size * self.head_dim % self.scale_bytes:
            values = self.block_size * self.head_dim
            raise ConfigError(f"{self}: the {values} bytes of a page end within a float32, its scales follow them")
        if self.unit_bytes % WORD:
            raise ConfigError(f"{self}: a head of a block is {self.unit_bytes} bytes, not a multiple of {WORD}")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one vector, 0 for dtypes without."""
        return SCALE_BYTES.get(self.dtype, 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of K or V of one head and layer of one block."""
        return self.block_size * (self.head_dim * self.item_bytes + self.scale_bytes)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one kv head of one block: the unit that is digested."""
        return self.layers * 2 * self.page_bytes

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.unit_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per position."""
        return self.block_bytes // self.block_size

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """The shape of a pool of `num_blocks` blocks as values; with scales between them it has none."""
        if self.scale_bytes:
            raise ValueError(f"a pool of {self.dtype} is no array of values alone")
        return (num_blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    def difference(self, other: "KVLayout") -> str | None:
        """The first field that differs, with both values, or None when the layouts are equal."""
        for name in ("layers", "kv_heads", "head_dim", "block_size", "dtype"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} here, {getattr(other, name)} there"
        return None
