"""Does the digest of the private copy catch every block the holder overwrote under the read, and no other?

1. Check the digest against its three golden values. 2. Warm the link. 3. Read 64 MB in slots of eleven blocks (4 MB)
while the holder overwrites every second block, four bytes of each. 4. Copy each slot, digest the copy, compare with the
digests published before. Ground truth is the original content, byte by byte: caught must equal altered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
from nixl_pair import (
    BLOCK,
    PER_SLOT,
    QUIET,
    TRANSPORTS,
    Holder,
    agent,
    check_golden,
    content,
    digest,
    read,
    register,
    warm,
)

SLOTS = 16
BLOCKS = SLOTS * PER_SLOT
OVERWRITE = {"do": "overwrite", "blocks": list(range(0, BLOCKS, 2)), "every": BLOCK // 4}
POLL = {"do": "poll", "seconds": 1.0}
PLANS = {
    "never": ([], POLL),
    "before": ([OVERWRITE], POLL),
    "during": ([], {**OVERWRITE, "pause": 0.5e-3, "seconds": 1.0}),
}


def experiment(transport: str, plan: str) -> None:
    original = content(BLOCKS).reshape(BLOCKS, BLOCK)
    with Holder(BLOCKS) as holder:
        nixl = agent("reader")
        staging = np.empty((PER_SLOT, BLOCK), np.uint8)
        copy = np.zeros_like(staging)
        register(nixl, staging)
        peer = nixl.add_remote_agent(holder.metadata)
        warm(nixl, peer, staging, holder)
        first, beside = PLANS[plan]
        for command in first:
            holder.ask(**command)
        holder.tell(**beside)
        caught, altered, reading, verifying = set(), set(), 0.0, 0.0
        for slot in range(SLOTS):
            blocks = range(slot * PER_SLOT, (slot + 1) * PER_SLOT)
            start = time.perf_counter()
            state, handle = read(nixl, peer, staging, holder, blocks, limit=5)
            assert state == "DONE", state
            nixl.release_xfer_handle(handle)
            reading += time.perf_counter() - start
            start = time.perf_counter()
            np.copyto(copy, staging)
            caught |= {b for b, row in zip(blocks, copy, strict=True) if digest(row) != holder.hello["digests"][b]}
            verifying += time.perf_counter() - start
            altered |= {b for b, row in zip(blocks, copy, strict=True) if not np.array_equal(row, original[b])}
        holder.reply()
    size = BLOCKS * BLOCK / 1e9
    print(f"{transport:4} overwritten {plan:7} altered copies {len(altered):3}  caught {len(altered & caught):3}"
          f"  false alarms {len(caught - altered)} | read {size / reading:5.2f} GB/s"
          f"  copy + digest {size / verifying:5.2f} GB/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    check_golden()
    if len(sys.argv) > 1:
        for plan in PLANS:
            experiment(sys.argv[1], plan)
    else:  # UCX reads its environment once a process: one child per transport
        for name in ("CMA", "TCP"):
            env = TRANSPORTS[name]
            subprocess.run([sys.executable, __file__, name], env={**os.environ, **QUIET, **env}, check=True)
