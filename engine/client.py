"""The server's side of an engine process: start it, talk to it, see it end (DESIGN §2). Imports no torch.

1. `spawn` makes a socket pair and starts `python -m <module> --fd N` with the other end as descriptor N. The module is
   the worker package's `engine_process`: only a worker package may bring engine and transport together.
2. `channel` carries commands and reports (engine/channel.py); the first command is Init.
3. The engine leaves on Shutdown, when the channel closes, and when this process dies in whatever way (it asks the
   kernel for SIGKILL in that case, engine/process.py). The channel ends when the engine dies.

What the engine prints goes to this process's stderr. It runs in a session of its own, so that a Ctrl-C or a SIGTERM to
the server's process group leaves it alive for the drain.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence

from engine.channel import ChannelClosed, SocketChannel
from engine.messages import Command, Shutdown

_STDERR = 2


class EngineProcess:
    """A running engine. Made by `EngineProcess.spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, channel: SocketChannel) -> None:
        self._process = process
        self.channel = channel

    @classmethod
    async def spawn(cls, module: str, arguments: Sequence[str] = ()) -> "EngineProcess":
        """Start `python -m module --fd N arguments...`. Raises OSError when no process can be started.

        A module that cannot be run ends the process at once: the channel ends and `wait` gives the code.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Both ends are close-on-exec; pass_fds makes `theirs`, and nothing else, inheritable in this child alone.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=_STDERR, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, await SocketChannel.open(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    def send(self, command: Command) -> None:
        """Tell the engine. Nothing when it is gone: who follows the channel hears of its end (and acts upon it)."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(command)

    async def exit_code(self, within_s: float = 1.0) -> int | None:
        """The exit code of an engine whose channel has ended; None when it has not left by then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), within_s)
        return self.returncode

    async def wait(self) -> int:
        """Until the process has ended. Returns its exit code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """SIGTERM; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float = 5.0) -> int:
        """Ask it to leave, kill it after `grace_s`, close the channel. Returns the exit code."""
        self.send(Shutdown())
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()
        finally:
            self.channel.close()
            await self.channel.wait_closed()
