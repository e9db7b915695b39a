"""Must the holder make NIXL calls for a read to be reported done?

For each transport, with a fresh pair of processes each time: 1. a first read while the holder sits in readline() and
never polls; 2. a read while it polls (warm); 3. four reads after it went silent; 4. a last one while it polls again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
from nixl_pair import BLOCK, PER_SLOT, QUIET, TRANSPORTS, Holder, agent, digest, read, register, until

PAIRS = 4


def experiment(skip_cold: bool) -> None:
    with Holder(PER_SLOT) as holder:
        nixl = agent("reader")
        staging = np.zeros((PER_SLOT, BLOCK), np.uint8)
        register(nixl, staging)
        peer = nixl.add_remote_agent(holder.metadata)

        def one() -> str:
            staging.fill(0)
            state, _handle = read(nixl, peer, staging, holder, range(PER_SLOT), limit=0.2)
            whole = all(digest(row) == want for row, want in zip(staging, holder.hello["digests"], strict=True))
            return f"{state}{'' if whole == (state == 'DONE') else ' (all bytes landed)'}"

        def polled(seconds: float) -> str:
            holder.tell(do="poll", seconds=seconds)
            state = one()
            until(time.monotonic() + seconds, nixl.get_new_notifs)
            holder.reply()
            return state

        print(f"  first, silent: {'-' if skip_cold else one()}", end="; ")
        print(f"polled: {polled(0.3)}; then silent: {[one() for _ in range(4)]}", end="; ")
        print(f"polled again: {polled(0.1)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        experiment(skip_cold=sys.argv[1] == "warm")
    else:
        for name, env in TRANSPORTS.items():
            print(name, flush=True)
            for kind in ["cold"] + ["warm"] * (PAIRS - 1):
                subprocess.run(
                    [sys.executable, __file__, kind],
                    env={**os.environ, **QUIET, **env}, stderr=subprocess.DEVNULL, timeout=60, check=True,
                )  # fmt: skip
