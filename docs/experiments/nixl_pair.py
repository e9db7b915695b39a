"""A KV holder in its own process, for the experiments next to this file.

1. The parent starts `python nixl_pair.py '{...}'` with UCX_* in its environment.
2. The holder registers memory, fills it, and answers one JSON line: base, bytes, metadata (base64), digests.
3. It obeys one JSON line at a time on stdin: {"do": "overwrite", "blocks": [...]}, {"do": "poll", "seconds": s}, ...
   Between commands it sits in readline(): it makes no NIXL call and runs no progress thread.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from functools import lru_cache
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

C, K = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
BLOCK = 372_736  # 91 pages, a multiple of 8: eleven of them fill a 4 MB slot to 98 %
PER_SLOT = 11
QUIET = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
NO_PEER_CHECK = '{"ucx_error_handling_mode": "none"}'
TRANSPORTS = {
    "CMA": {"UCX_TLS": "cma,tcp,self"},
    "CMA, no keepalive": {"UCX_TLS": "cma,tcp,self", "UCX_KEEPALIVE_INTERVAL": "inf"},
    "CMA, no TCP": {"UCX_TLS": "posix,cma,self", "EXPERIMENT_UCX": NO_PEER_CHECK},
    "TCP": {"UCX_TLS": "tcp,self"},
}


@lru_cache
def weights(words: int) -> NDArray[np.uint64]:
    """splitmix64 from seed 0, outputs 1..words, made odd (DESIGN §4)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, words + 1, dtype=np.uint64) * C
        z = (z ^ (z >> np.uint64(30))) * K
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return cast("NDArray[np.uint64]", (z ^ (z >> np.uint64(31))) | np.uint64(1))


@lru_cache
def scratch(words: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return np.empty(words, np.uint64), np.empty(words, np.uint64)


def digest(raw: NDArray[np.uint8]) -> int:
    """In scratch memory: letting numpy make its temporaries costs a factor of 1.1 to 3, by allocator mood."""
    x = raw.view("<u8")
    y, high = scratch(len(x))
    np.bitwise_xor(x, C, out=y)
    np.multiply(y, K, out=y)
    np.right_shift(y, np.uint64(32), out=high)
    np.bitwise_xor(y, high, out=y)
    np.multiply(y, weights(len(x)), out=y)
    return int(y.sum(dtype=np.uint64))


def check_golden() -> None:
    golden = {
        bytes(64): 0xA8A3409853CDFC24,
        bytes(range(256)): 0x728E6EE6C422A453,
        b"\xff" * 64: 0x446A36796BCF2D50,
    }
    for raw, want in golden.items():
        got = digest(np.frombuffer(raw, np.uint8))
        assert got == want, f"{got:#x} != {want:#x}"


def agent(name: str, progress: bool = False) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    # backends=[] and create_backend: the only way to pass the plugin's own parameters
    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=[]))
    made.create_backend("UCX", json.loads(os.environ.get("EXPERIMENT_UCX", "{}")))
    return made


def register(nixl: Any, memory: NDArray[np.uint8]) -> Any:
    memory.fill(0)  # pre-touch: every page exists before UCX sees it
    return nixl.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def content(blocks: int) -> NDArray[np.uint8]:
    """What a holder fills its memory with; the reader uses it as ground truth only."""
    return np.random.default_rng(0).integers(0, 256, blocks * BLOCK, np.uint8)


class Holder:
    """The parent's side. `with Holder(blocks, UCX_TLS="tcp,self") as h:`"""

    def __init__(self, blocks: int, name: str = "holder", progress: bool = False, **env: str) -> None:
        config = json.dumps({"name": name, "blocks": blocks, "progress": progress})
        self.process = subprocess.Popen(
            [sys.executable, __file__, config],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.hello = self.reply()
        self.metadata = base64.b64decode(self.hello["metadata"])

    def reply(self) -> dict[str, Any]:
        line = cast("IO[str]", self.process.stdout).readline()
        return cast("dict[str, Any]", json.loads(line))

    def tell(self, **command: Any) -> None:
        pipe = cast("IO[str]", self.process.stdin)
        pipe.write(json.dumps(command) + "\n")
        pipe.flush()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.reply()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def read(
    nixl: Any, peer: bytes, staging: NDArray[np.uint8], holder: Holder, blocks: range, limit: float
) -> tuple[str, Any]:
    """Read `blocks` into the start of `staging`; the state after at most `limit` seconds, and the handle."""
    n = len(blocks)
    here = [(staging.ctypes.data + i * BLOCK, BLOCK, 0) for i in range(n)]
    there = [(holder.hello["base"] + b * BLOCK, BLOCK, 0) for b in blocks]
    handle = nixl.initialize_xfer("READ", nixl.get_xfer_descs(here, "DRAM"), nixl.get_xfer_descs(there, "DRAM"), peer)
    state, end = nixl.transfer(handle), time.monotonic() + limit
    while state == "PROC" and time.monotonic() < end:
        time.sleep(200e-6)
        state = nixl.check_xfer_state(handle)
    return state, handle


def warm(nixl: Any, peer: bytes, staging: NDArray[np.uint8], holder: Holder) -> None:
    holder.tell(do="poll", seconds=0.3)
    state, _ = read(nixl, peer, staging, holder, range(1), limit=5)
    holder.reply()
    assert state == "DONE", state


def until(end: float, poll: Any) -> None:
    while time.monotonic() < end:
        poll()
        time.sleep(200e-6)


def hold(config: dict[str, Any]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL logs to stdout; the pipe must carry nothing but our lines
    nixl = agent(config["name"], config["progress"])
    blocks = config["blocks"]
    memory = np.empty(blocks * BLOCK, np.uint8)
    register(nixl, memory)
    memory[:] = content(blocks)
    rows = memory.reshape(blocks, BLOCK)
    hello = {
        "base": memory.ctypes.data, "pid": os.getpid(),
        "metadata": base64.b64encode(nixl.get_agent_metadata()).decode(),
        "digests": [digest(row) for row in rows],
    }  # fmt: skip
    print(json.dumps(hello), file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "overwrite":
            for block in command["blocks"]:
                rows[block, :: command.get("every", 1)] ^= 0xFF
                if pause := command.get("pause"):
                    nixl.get_new_notifs()
                    time.sleep(pause)
            until(time.monotonic() + command.get("seconds", 0.0), nixl.get_new_notifs)
        elif command["do"] == "poll":  # a holder gives UCX its turn only by asking for notifications
            until(time.monotonic() + command["seconds"], nixl.get_new_notifs)
        print(json.dumps({"done": command["do"]}), file=out, flush=True)


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
