"""Programs of others that a benchmark starts: servers and routers that it is compared with."""

import asyncio
import os
import signal
import socket
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from benchmarks.http_client import Answer, HttpClient
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable

START_S = 600.0  # two at a time on a busy machine, which compile what they run
ANSWER_S = 60.0
POLL_S = 0.1
STOP_S = 10.0
TOLD = 2000  # of a log that is shown
PROMPT = "hello there, how are you today?"


@dataclass(frozen=True, slots=True)
class Program:
    """One that runs, with everything it started itself in a process group of its own."""

    process: Process
    log: BinaryIO

    @property
    def pid(self) -> int:
        return self.process.pid

    def tail(self) -> str:
        """The end of what it wrote. Read in place: the offset of the file is its own."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), TOLD, max(0, size - TOLD)).decode(errors="replace")

    async def answering(self, port: int, label: str, clock: Clock) -> None:
        """As `answering`, but Unavailable comes at once when it has ended, and with the end of its log."""
        try:
            await answering(port, label, clock, lambda: self.process.returncode is not None)
        except Unavailable as error:
            raise Unavailable(f"{error}: {self.tail()}") from error


async def answering(port: int, label: str, clock: Clock, ended: Callable[[], bool] = lambda: False) -> None:
    """Until a completion of the model called `label` is answered there. Raises Unavailable."""
    give_up = clock.now() + START_S
    async with HttpClient(f"http://127.0.0.1:{port}", label, clock, timeout_s=ANSWER_S) as client:
        while True:  # readiness is polled, as an operator's probe would
            try:
                answer: Answer | None = await client.complete(PROMPT, 8)
            except (OSError, TimeoutError):
                answer = None
            if answer is not None and answer.status == 200:
                return
            if ended() or clock.now() > give_up:
                raise Unavailable(f"port {port} does not answer (last status {answer and answer.status})")
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def running(
    command: Sequence[str],
    cores: Iterable[int] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    talks: bool = False,
) -> AsyncIterator[Program]:
    """Start a program, pinned to `cores` if given, with `env` beside this process's variables; ends it afterwards.

    One that `talks` reads and writes lines: its input and output are pipes, else all it writes is its log.
    Raises Unavailable when there is no such program.
    """
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE if talks else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if talks else log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be started: {error}") from error
        try:
            yield Program(process, log)
        finally:
            await end(process)


async def end(process: Process) -> None:
    """Asks its group to end, and makes what stays."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)  # it may have been stopped
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def family(roots: Iterable[int]) -> set[int]:
    """These processes, what they started, and what that started. Raises psutil.NoSuchProcess for `roots`."""
    found = set(roots)
    for root in sorted(found):
        found |= {child.pid for child in psutil.Process(root).children(recursive=True)}
    return found


def pin(pid: int, cores: Iterable[int]) -> None:
    """Every thread of a process: the call speaks of threads, and later ones inherit."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), set(cores))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
