"""What does a read report when its holder is frozen or killed under it, and does the reader live?

1. Warm the link, freeze or kill the holder just before or just after a read of 4 MB is posted. 2. Watch the state while
polling as a wire thread would. 3. Keep the read, remove the peer, or release the handle; watch again. 4. Thaw the
holder and see whether bytes still land in the slot the reader believes free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl_pair import BLOCK, PER_SLOT, QUIET, TRANSPORTS, Holder, agent, digest, read, register, warm

CASES = [("SIGSTOP", "before", "keep"), ("SIGSTOP", "before", "remove"), ("SIGSTOP", "before", "release"),
         ("SIGKILL", "before", "keep"), ("SIGKILL", "after", "keep")]  # fmt: skip


def attempt(call: Callable[..., Any], *args: Any) -> str:
    try:
        return str(call(*args))
    except Exception as error:  # the experiment's question is which one comes
        return type(error).__name__


def watch(nixl: Any, handle: Any, seconds: float) -> str:
    """Every state seen with the time it first came. get_new_notifs gives UCX its turn even when the state raises."""
    start, seen = time.monotonic(), {}
    while (now := time.monotonic() - start) < seconds:
        if handle is not None:
            seen.setdefault(attempt(nixl.check_xfer_state, handle), f"{1e3 * now:.0f}")
        nixl.get_new_notifs()
        time.sleep(200e-6)
    return ", ".join(f"{state} at {when} ms" for state, when in seen.items()) or "no handle"


def experiment(name: str, stop: signal.Signals, moment: str, then: str) -> None:
    with Holder(PER_SLOT) as holder:
        nixl = agent("reader")
        staging = np.empty((PER_SLOT, BLOCK), np.uint8)
        register(nixl, staging)
        peer = nixl.add_remote_agent(holder.metadata)
        warm(nixl, peer, staging, holder)
        staging.fill(0)
        holder.tell(do="poll", seconds=60)

        def landed() -> str:
            hits = [digest(row) == want for row, want in zip(staging, holder.hello["digests"], strict=True)]
            return f"{sum(hits)} of {PER_SLOT} blocks landed"

        if moment == "before":
            os.kill(holder.hello["pid"], stop)
            time.sleep(0.1)
        try:
            state, handle = read(nixl, peer, staging, holder, range(PER_SLOT), limit=0)
        except Exception as error:  # the experiment's question is which one comes
            print(f"  transfer() raises {type(error).__name__}", flush=True)
            return
        if moment == "after":
            os.kill(holder.hello["pid"], stop)
        print(f"  transfer(): {state}; state {watch(nixl, handle, 2)}; {landed()}", flush=True)
        if then == "remove":
            print(f"  remove_remote_agent: {attempt(nixl.remove_remote_agent, peer)}; state {watch(nixl, handle, 0.5)}")
        if then == "release":
            print(f"  release_xfer_handle: {attempt(nixl.release_xfer_handle, handle)}")
            handle = None
        if stop == signal.SIGSTOP:
            before = landed()
            os.kill(holder.hello["pid"], signal.SIGCONT)
            print(f"  thawed: state {watch(nixl, handle, 1)}; {before} before, {landed()} after", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        experiment(sys.argv[1], signal.Signals[sys.argv[2]], sys.argv[3], sys.argv[4])
    else:
        for name, env in TRANSPORTS.items():
            for case in CASES:
                print(f"{name}: {case[0]} {case[1]} the read, then {case[2]}", flush=True)
                done = subprocess.run(
                    [sys.executable, __file__, name, *case],
                    env={**os.environ, **QUIET, **env}, stderr=subprocess.DEVNULL, timeout=60,
                )  # fmt: skip
                print(f"  reader exit status {done.returncode}", flush=True)
