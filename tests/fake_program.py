"""A program that speaks the supervisor's protocol and does nothing else; supervisors are tested with it.

Its behaviour is in its name: prefill-9 exits at once with code 3, decode-9 never gets ready and ignores SIGTERM, every
other name is a good program that has one child and writes each members list it hears, after how many are desired, to
the FIFO `<config folder>/<name>` where the test made one (`Hearing`). On SIGUSR1 it asks for what is in the file
`<config folder>/wish`, and writes the answer to the FIFO too.
"""

import asyncio
import os
import select
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cluster.core.ids import new_epoch
from cluster.pipe import Drain, Member, Scale, Wish, role_of
from cluster.program import ProgramContext, run

PATIENCE_S = 20.0


class Hearing:
    """The test's end of the FIFO: waits, blocking, for what a fake program hears."""

    def __init__(self, folder: Path, name: str) -> None:
        self._fifo = folder / name
        os.mkfifo(self._fifo)
        self._end = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        self._text = b""

    def until(self, *members: Member) -> None:
        """Wait for exactly this list."""
        self.until_line(_line(members))

    def until_line(self, line: str) -> None:
        """Wait for exactly this line."""
        wanted = line.encode()
        while wanted not in self._text.splitlines(keepends=True):
            assert select.select([self._end], [], [], PATIENCE_S)[0], f"heard {self._text!r}, not {wanted!r}"
            self._text += os.read(self._end, 65536)
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._fifo.unlink()  # before there is nobody to read it
        os.close(self._end)


def _line(members: tuple[Member, ...]) -> str:
    return " ".join(f"{member.name}={member.epoch}" for member in members) + "\n"


async def _serve(context: ProgramContext) -> None:
    fifo = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(context.name)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    sys.stdout.write("a stray print that must not reach the supervisor\n")
    asking: list[asyncio.Future[None]] = []
    asyncio.get_running_loop().add_signal_handler(  # before anybody hears that it is ready, and asks
        signal.SIGUSR1, lambda: asking.append(asyncio.ensure_future(_ask(context, fifo)))
    )
    context.report_ready(address=f"{context.name}:1", epoch=new_epoch(), pids=[child.pid])
    following = asyncio.ensure_future(_follow(context, fifo))
    await context.stopping.wait()
    following.cancel()
    child.terminate()
    await child.wait()


async def _follow(context: ProgramContext, fifo: Path) -> None:
    async for members in context.members.updates():
        if fifo.exists():
            _tell(fifo, f"desired: {msgspec.json.encode(context.members.desired).decode()}\n" + _line(members))


async def _ask(context: ProgramContext, fifo: Path) -> None:
    wish: Wish = msgspec.json.decode(fifo.with_name("wish").read_bytes(), type=Drain | Scale)
    _tell(fifo, f"answer: {await context.wishes.ask(wish)}\n")


def _tell(fifo: Path, line: str) -> None:
    end = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    os.write(end, line.encode())
    os.close(end)


def main() -> int:
    name = sys.argv[sys.argv.index("--name") + 1]
    if name == "prefill-9":
        return 3
    if name == "decode-9":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    return run(role_of(name), _serve)


if __name__ == "__main__":
    sys.exit(main())
