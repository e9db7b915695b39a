"""What a worker's hello says of it, for good."""

from dataclasses import dataclass

from cluster.core.protocol import PROTOCOL
from cluster.stubs.watch_pb2 import WatchHello
from router.placement import Shape

LONGEST_NAME = 128  # of a worker, on pages and in labels


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker's Hello says, for good: as plain values, because placement reads them all the time.

    `mismatch`: why it can get no work, whatever becomes of it; "" where it can.
    """

    name: str
    epoch: int
    role: str
    shape: Shape
    max_context: int
    num_blocks: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    routing_stride: int  # blocks of a chain from one that is told to the next
    mismatch: str = ""

    @property
    def pool_tokens(self) -> int:
        """Positions of the whole pool."""
        return self.num_blocks * self.shape.layout[3]


NOBODY = Facts("", 0, "", Shape(0, (0, 0, 0, 0, ""), b""), 0, 0, 0, (), 1)


def read_hello(hello: WatchHello) -> Facts:
    """The facts of a live Hello."""
    identity, layout = hello.identity, hello.identity.layout
    return Facts(
        name=identity.worker[:LONGEST_NAME],
        epoch=identity.epoch,
        role=identity.role,
        shape=Shape(
            identity.protocol,
            (layout.layers, layout.kv_heads, layout.head_dim, layout.block_size, layout.dtype),
            identity.fingerprint,
            tuple(sorted(identity.sources.items())),
        ),
        max_context=hello.max_context,
        num_blocks=hello.num_blocks,
        vocab_size=hello.vocab_size,
        eos_ids=tuple(hello.eos_ids),
        routing_stride=max(1, hello.routing_stride),
        mismatch=_mismatch(hello),
    )


def _mismatch(hello: WatchHello) -> str:
    identity, layout = hello.identity, hello.identity.layout
    if identity.protocol != PROTOCOL:
        return f"protocol {identity.protocol}, this router speaks {PROTOCOL}"
    if identity.role not in ("prefill", "decode"):
        return f"unknown role {identity.role!r}"
    sizes = {
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "num_blocks": hello.num_blocks,
        "max_context": hello.max_context,
    }
    # What cannot be: nothing is divided by a block of no size.
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size < 1)
