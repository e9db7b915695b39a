"""A holder of KV for the transport contract: a pool that a reader may read, in its own process or in this one.

`python -m tests.contract.kv_holder AGENT OPTIONS` is the process: it runs the real wire thread, says one JSON line
(metadata, pool address, staging address) and obeys one JSON line at a time, answering each with `true`. Its stdout is
that protocol, so any line that a library writes there breaks the tests.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.core.clock import SystemClock
from engine.messages import Report, Serve
from engine.wire import Transport
from engine.wire_thread import WireThread
from kv_transfer.transports import make_transport
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport

BLOCKS = 64
BLOCK_BYTES = 128 * 1024
SLOWNESS = 10.0
ROOT = Path(__file__).resolve().parents[2]

Bytes = NDArray[np.uint8]


def content() -> Bytes:
    """[BLOCKS, BLOCK_BYTES] of every holder: no two 4-byte words are equal."""
    return np.arange(BLOCKS * BLOCK_BYTES // 4, dtype=np.uint32).view(np.uint8).reshape(BLOCKS, BLOCK_BYTES)


class SlowClock(SystemClock):
    """A clock that a test may push ahead. Else it is slow: what must be done in time is done on a busy machine too."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        return super().now() / SLOWNESS + self.skipped


class Memory:
    """A holder's pool and staging, and a thread that may flip every bit of the pool again and again."""

    def __init__(self) -> None:
        self.pool = content().copy()
        self.staging = np.zeros((1, BLOCK_BYTES), np.uint8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def overwrite(self, on: bool) -> None:
        """Start or stop flipping. When stopped the pool is what it was."""
        if on:
            self._stop.clear()
            self._thread = threading.Thread(target=self._flip)
            self._thread.start()
        elif self._thread is not None:
            self._stop.set()
            self._thread.join()

    def _flip(self) -> None:
        while not self._stop.is_set():
            for _ in range(2):
                np.bitwise_xor(self.pool, 0xFF, out=self.pool)


class Holder(Protocol):
    """What the contract needs of a holder."""

    agent: str
    metadata: bytes
    address: int
    staging_address: int

    def serve(self, on: bool) -> None: ...

    def overwrite(self, on: bool) -> None: ...

    def kill(self) -> None:
        """End at once, without a word to anybody."""


class LocalHolder:
    """A holder in this process, for the in-process transport."""

    def __init__(self, agent: str, network: InProcessNetwork) -> None:
        self.agent = agent
        self._memory = Memory()
        self._wire = WireThread(_ignore, _fail)
        make = InProcessTransport(network, agent, SystemClock())
        _, self.metadata = self._wire.start(lambda: make, self._memory.pool, self._memory.staging)
        self.address = int(self._memory.pool.ctypes.data)
        self.staging_address = int(self._memory.staging.ctypes.data)

    def serve(self, on: bool) -> None:
        self._wire.submit(Serve(on))

    def overwrite(self, on: bool) -> None:
        self._memory.overwrite(on)

    def kill(self) -> None:
        self._wire.stop()


class ProcessHolder:
    """A holder in its own process, over NIXL."""

    def __init__(self, agent: str, options: dict[str, str]) -> None:
        self.agent = agent
        command = [sys.executable, "-m", "tests.contract.kv_holder", agent, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        hello = json.loads(self._line())
        self.metadata = base64.b64decode(hello["metadata"])
        self.address: int = hello["address"]
        self.staging_address: int = hello["staging"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def serve(self, on: bool) -> None:
        self._tell({"serve": on})

    def overwrite(self, on: bool) -> None:
        self._tell({"overwrite": on})

    def freeze(self) -> None:
        """Returns when it stands still: a signal takes its time, and until then the holder would answer."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, order: dict[str, bool]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert json.loads(self._line()) is True

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _ignore(report: Report) -> None:
    raise AssertionError(f"a holder reads nothing, so it has nothing to report: {report}")


def _fail(error: BaseException) -> None:
    raise error


def _make(options: dict[str, str], agent: str) -> Transport:
    return make_transport("nixl", options, agent)


def main(agent: str, options: dict[str, str]) -> None:
    """The holder's process."""
    memory = Memory()
    wire = WireThread(_ignore, _fail)
    _, metadata = wire.start(lambda: _make(options, agent), memory.pool, memory.staging)
    hello = {
        "metadata": base64.b64encode(metadata).decode(),
        "address": int(memory.pool.ctypes.data),
        "staging": int(memory.staging.ctypes.data),
    }
    sys.stdout.write(json.dumps(hello) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        if "serve" in order:
            wire.submit(Serve(order["serve"]))
        if "overwrite" in order:
            memory.overwrite(order["overwrite"])
        sys.stdout.write("true\n")
        sys.stdout.flush()
    memory.overwrite(False)
    wire.stop()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
