"""How long things take on modelled workers. Positions are those of the scaled prompts.

The figures of `H100_NODE` are a roofline for Llama-3 70B in 16 bit on nodes of eight H100 (989 TFLOP/s dense and
3.35 TB/s each, used at 45 and 70 %): a position costs 140 GFLOP, and 2.6 MFLOP per position before it; a decode step
reads 141 GB of weights once and 327,680 bytes of KV per position, of which 1,370,000 fit. A chunk is 2,048 positions.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of worker. Seconds per unit; `gb_per_s`: what a decode worker reads at, from all prefill workers."""

    pool_positions: int
    chunk: int
    overhead_s: float
    position_s: float
    depth_s: float
    step_s: float
    row_s: float
    context_s: float
    kv_bytes: int
    gb_per_s: float
    local_share: float = 0.5

    def read_s(self, start: int, count: int) -> float:
        """To compute `count` positions from `start` on, without a step's overhead."""
        return count * (self.position_s + self.depth_s * (start + count / 2))

    def decode_s(self, batch: int, context: float) -> float:
        """One token for each of `batch` streams that hold `context` positions together."""
        return self.step_s + batch * self.row_s + context * self.context_s

    def move_s(self, positions: int) -> float:
        """KV of so many positions from a prefill worker to a decode worker."""
        return positions * self.kv_bytes / (self.gb_per_s * 1e9)

    def scaled(self, by: int) -> "Hardware":
        """The same worker when one position stands for `by` of them."""
        return Hardware(
            pool_positions=self.pool_positions // by,
            chunk=self.chunk // by,
            overhead_s=self.overhead_s,
            position_s=self.position_s * by,
            depth_s=self.depth_s * by * by,
            step_s=self.step_s,
            row_s=self.row_s,
            context_s=self.context_s * by,
            kv_bytes=self.kv_bytes * by,
            gb_per_s=self.gb_per_s,
            local_share=self.local_share,
        )


H100_NODE = Hardware(
    pool_positions=1_370_000,
    chunk=2048,
    overhead_s=0.008,
    position_s=40e-6,
    depth_s=0.75e-9,
    step_s=0.0075,
    row_s=20e-6,
    context_s=17e-9,
    kv_bytes=327_680,
    gb_per_s=100.0,
)
