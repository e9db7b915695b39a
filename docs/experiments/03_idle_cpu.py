"""What does an idle agent cost? CPU of one process over five seconds, in per cent of a core.

The process makes an agent, registers 64 MB, and does what a wire thread could do between reads. CPU time of the whole
process (all threads, user and system) is read before and after; start-up is not counted.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl_pair import QUIET, register

SECONDS = 5.0


def make(progress: bool, delay_us: int = 0) -> Any:
    """`nixl_agent` fixes pthrDelay at 0; the delay variant patches the binding's config for this one experiment."""
    from nixl import _api, _bindings

    class Config(_bindings.nixlAgentConfig):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = Config
    return _api.nixl_agent("idle", _api.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))


def block(nixl: Any, end: float) -> None:
    try:
        queue.Queue[None]().get(timeout=end - time.monotonic())
    except queue.Empty:
        return


def poller(pause: float, call: bool = True) -> Callable[[Any, float], None]:
    def loop(nixl: Any, end: float) -> None:
        while time.monotonic() < end:
            if call:
                nixl.get_new_notifs()
            time.sleep(pause)

    return loop


VARIANTS: dict[str, tuple[bool, int, Callable[[Any, float], None]]] = {
    "progress thread (Python default), blocked": (True, 0, block),
    "progress thread delayed 1 ms, blocked": (True, 1000, block),
    "no progress thread, blocked on a queue": (False, 0, block),
    "no progress thread, get_new_notifs each 0.2 ms": (False, 0, poller(200e-6)),
    "no progress thread, get_new_notifs each 1 ms": (False, 0, poller(1e-3)),
    "no progress thread, get_new_notifs each 5 ms": (False, 0, poller(5e-3)),
    "sleep(0.2 ms) alone, no NIXL call": (False, 0, poller(200e-6, call=False)),
}


def experiment(variant: str) -> None:
    progress, delay_us, idle = VARIANTS[variant]
    nixl = make(progress, delay_us)
    register(nixl, np.empty(64 << 20, np.uint8))
    before = sum(os.times()[:2])
    idle(nixl, time.monotonic() + SECONDS)
    used = sum(os.times()[:2]) - before
    threads = len(os.listdir("/proc/self/task"))
    print(f"{variant:50} {100 * used / SECONDS:6.1f} % of a core, {threads} threads", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        experiment(json.loads(sys.argv[1]))
    else:
        for variant in VARIANTS:
            subprocess.run([sys.executable, __file__, json.dumps(variant)], env={**os.environ, **QUIET}, check=True)
