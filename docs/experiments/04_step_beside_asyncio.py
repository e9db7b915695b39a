"""What does a busy asyncio loop cost a torch step, in the same process and in a process of its own?

A step is 600 small ops and one medium matrix product on one thread. The loop does what a server does: it encodes,
decodes and sorts small dicts without a pause, in turns of about 0.1 or 2 ms between two looks at the selector.
Alternating rounds. Wall time less the step's own CPU time is waiting: for the GIL, or for a core other work holds.
Then the price of having two processes: a 32-row message echoed over a Unix socket, length-prefixed msgpack.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import torch

ROUNDS, STEPS, ECHOES = 3, 20, 5000
ROWS = [{"seq": i, "ids": [1000 + i], "pos": 17 * i, "blocks": [i, i + 1], "temp": 0.7, "seed": i} for i in range(32)]


def busy(stop: threading.Event, batches: int) -> None:
    async def serve() -> None:
        while not stop.is_set():
            for _ in range(batches):
                for row in msgpack.unpackb(msgpack.packb(ROWS)):
                    dict(sorted(row.items()))
            await asyncio.sleep(0)

    asyncio.run(serve())


def echo(path: socket.socket) -> None:
    while head := path.recv(4, socket.MSG_WAITALL):
        body = path.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
        answer = msgpack.packb(msgpack.unpackb(body))
        path.sendall(struct.pack("<I", len(answer)) + answer)


@contextmanager
def beside(where: str, batches: int) -> Iterator[None]:
    if where == "alone":
        yield
        return
    context = multiprocessing.get_context("spawn")
    stop = threading.Event() if where == "thread" else context.Event()
    runner = threading.Thread if where == "thread" else context.Process
    other = runner(target=busy, args=(stop, batches))
    other.start()
    time.sleep(2 if where == "process" else 0.1)  # a spawned child imports torch first
    try:
        yield
    finally:
        stop.set()
        other.join()


def step(x: torch.Tensor, big: torch.Tensor) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(200):
        x = torch.tanh(x * 1.01 + 0.1)
    torch.mm(big, big)
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.thread_time() - cpu)


def measure_echo(kind: str, rows: list[object]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    child = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs,))
    child.start()
    theirs.close()
    message = msgpack.packb(rows)
    times = []
    for _ in range(ECHOES):
        start = time.perf_counter()
        ours.sendall(struct.pack("<I", len(message)) + message)
        msgpack.unpackb(ours.recv(struct.unpack("<I", ours.recv(4, socket.MSG_WAITALL))[0], socket.MSG_WAITALL))
        times.append(1e6 * (time.perf_counter() - start))
    ours.close()
    child.join()
    codec = time.perf_counter()
    for _ in range(ECHOES):
        msgpack.unpackb(msgpack.packb(rows))
    codec = 1e6 * (time.perf_counter() - codec) / ECHOES
    print(f"echo of 32 rows as {kind}, {len(message)} bytes: p50 {statistics.median(times):.0f} us, "
          f"p99 {statistics.quantiles(times, n=100)[98]:.0f} us; packb + unpackb alone {codec:.0f} us")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x, big = torch.randn(8, 576), torch.randn(256, 256)
    cases = {
        "alone": ("alone", 0),
        "in a thread, 0.1 ms turns": ("thread", 1),
        "in a thread, 2 ms turns": ("thread", 20),
        "in a process, 0.1 ms turns": ("process", 1),
        "in a process, 2 ms turns": ("process", 20),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            with beside(*case):
                took[name] += [step(x, big) for _ in range(STEPS)]
    for name, pairs in took.items():
        wall, cpu = zip(*pairs, strict=True)
        waited = [w - c for w, c in pairs]
        print(f"step, loop {name:27}: wall p50 {statistics.median(wall):5.1f} mean {statistics.fmean(wall):5.1f} "
              f"max {max(wall):6.1f} ms, CPU p50 {statistics.median(cpu):5.1f} ms, "
              f"waited mean {statistics.fmean(waited):5.1f} ms", flush=True)  # fmt: skip
    measure_echo("maps", list(ROWS))
    measure_echo("arrays", [list(row.values()) for row in ROWS])
