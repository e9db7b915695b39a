"""What every program (`python -m router | prefill_worker | decode_worker`) shares: how it starts, hears and stops.

1. parse     --config FILE --name decode-0 [--supervised]; a bad configuration is one readable line and exit code 2
2. tie       supervised: this process dies with its supervisor, and stray prints cannot reach the pipe
3. run       `main(context)` on uvloop: start the server, `context.report_ready(...)`, serve until `context.stopping`
4. members   supervised: `context.members` follows the supervisor's list, and how many programs there should be
5. stop      SIGTERM, SIGINT or the end of stdin set `stopping`; `main` has `timing.program_stop_s` to drain and return,
             then it is cancelled; a second signal cancels at once

    async def serve(context: ProgramContext) -> None: ...
    if __name__ == "__main__":
        sys.exit(run("decode", serve))
"""

import argparse
import asyncio
import ctypes
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from cluster.config import load_config
from cluster.core.clock import Clock, SystemClock
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError, HeadraceError, Unavailable
from cluster.credentials import Credentials
from cluster.logs import log_loop_error, setup_logging
from cluster.pipe import (
    MAX_LINE_BYTES,
    Answer,
    Ask,
    AskLine,
    Member,
    Ready,
    ReadyLine,
    Role,
    Wish,
    decode_to_program,
    encode,
    role_of,
)
from cluster.secret import cluster_secret
from cluster.tls import named_tls

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)

Main = Callable[["ProgramContext"], Awaitable[None]]


class Membership:
    """The programs of the cluster as the supervisor last told; empty and constant without one (see `seeds`).

    `desired`: how many of each role there should be, None where nobody knows; whoever wants to hear of it looks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.current: tuple[Member, ...] = ()
        self.desired: Mapping[Role, int] | None = None
        self._clock = clock or SystemClock()
        self._told: float | None = None
        self._changed = asyncio.Event()

    def replace(
        self, members: tuple[Member, ...], age_s: float = 0.0, desired: Mapping[Role, int] | None = None
    ) -> None:
        """Take the whole list, which was told so long ago; wake those who follow if it is another one."""
        self._told = self._clock.now() - age_s
        self.desired = desired
        if members == self.current:
            return
        self.current = members
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def age_s(self) -> float | None:
        """Since the list was last told, the same one or another, also to an earlier life of this program; None: it
        never was."""
        return None if self._told is None else self._clock.now() - self._told

    async def updates(self) -> AsyncIterator[tuple[Member, ...]]:
        """The list now, then the newest list after each change; lists that came in between are skipped. Never ends."""
        seen: tuple[Member, ...] | None = None
        while True:
            changed = self._changed
            if self.current is not seen:
                seen = self.current
                yield seen
            else:
                await changed.wait()


class Wishes:
    """Asks that wait for their answers. `pipe`: to the supervisor; None: there is none."""

    def __init__(self) -> None:
        self.pipe: int | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str | None]] = {}

    async def ask(self, wish: Wish) -> str | None:
        """What became of it: None when it was done, else why not. Cancelling stops the wait, not what was asked for.

        Raises Unavailable when there is nobody to ask.
        """
        if self.pipe is None:
            raise Unavailable("this program has no supervisor that could be asked")
        number = next(self._numbers)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            os.write(self.pipe, encode(AskLine(Ask(number, wish))))
            return await answer
        finally:
            del self._waiting[number]

    def answered(self, answer: Answer) -> None:
        """An answer that nobody waits for any more is nobody's."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.problem)


@dataclass(slots=True)
class ProgramContext:
    """What `main` gets. `stopping` is set once the program should drain and return."""

    config: ClusterConfig
    name: str
    role: Role
    secret: str
    credentials: Credentials
    members: Membership
    stopping: asyncio.Event
    wishes: Wishes = field(default_factory=Wishes)
    _supervisor: int | None = field(default=None, repr=False)  # file descriptor, None when not supervised

    def report_ready(
        self,
        *,
        address: str,
        epoch: int,
        http: str | None = None,
        admin: str | None = None,
        pids: Sequence[int] = (),
    ) -> None:
        """Tell the supervisor (and the log) that this program can take calls. `pids`: children; our own is added."""
        every = tuple(dict.fromkeys((os.getpid(), *pids)))
        ready = Ready(name=self.name, role=self.role, address=address, epoch=epoch, http=http, admin=admin, pids=every)
        _log.info("ready at %s, epoch %016x", ", ".join(filter(None, (address, http, admin))), epoch)
        if self._supervisor is not None:
            os.write(self._supervisor, encode(ReadyLine(ready)))


def run(role: Role, main: Main, arguments: Sequence[str] | None = None) -> int:
    """Run `main` as the program of `role` until it returns or is told to stop. Returns the exit code.

    0: ended in order; 1: `main` failed; 2: the configuration cannot be used.
    """
    options = _parse(role, arguments)
    try:
        config = load_config(options.config)
        secret = cluster_secret(config)
        credentials = Credentials(secret, named_tls(config.tls.internal))
        if role_of(options.name) != role:
            raise ConfigError(f"--name {options.name!r} is not possible for the role {role}")
    except HeadraceError as error:
        sys.stderr.write(f"{role}: {error}\n")
        return 2
    setup_logging(options.name, config.log_level, config.log_format)
    pipes = _tie_to_supervisor() if options.supervised else None
    context = ProgramContext(config, options.name, role, secret, credentials, Membership(), asyncio.Event())
    code: int = uvloop.run(_run(context, main, pipes))
    return code


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask Linux to end this process when the thread that started it ends; elsewhere the pipe alone must do.

    SIGKILL, because a supervisor that died unexpectedly is replaced at once and a frozen program must not stay beside
    its successor; an orderly stop comes over the pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Pipes:
    incoming: int
    outgoing: int


def _parse(role: Role, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Headrace: one {role} program of a cluster")
    parser.add_argument("--config", type=Path, required=True, help="cluster.yaml")
    parser.add_argument("--name", required=True, help=f"name in the cluster, for example {role}-0")
    parser.add_argument("--supervised", action="store_true", help="speak the supervisor's protocol on stdin and stdout")
    return parser.parse_args(arguments)


def _tie_to_supervisor() -> _Pipes:
    """Keep the two pipes for ourselves: children get no stdin and a stray print goes to the log."""
    die_with_parent()
    pipes = _Pipes(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return pipes


async def _run(context: ProgramContext, main: Main, pipes: _Pipes | None) -> int:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    working = asyncio.ensure_future(_guarded(main, context))
    _stop_on_signals(context.stopping, working)
    helpers = [asyncio.ensure_future(_limit_stop(context.stopping, working, context.config.timing.program_stop_s))]
    if pipes is not None:
        context._supervisor = context.wishes.pipe = pipes.outgoing
        helpers.append(asyncio.ensure_future(_follow_supervisor(pipes.incoming, context)))
    try:
        return await working
    except asyncio.CancelledError:
        _log.warning("stopped before everything was drained")
        return 0
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _guarded(main: Main, context: ProgramContext) -> int:
    """The one guard of a program: whatever `main` raises is logged with its traceback, and the process ends."""
    try:
        await main(context)
    except HeadraceError as error:
        _log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:
        _log.exception("%s failed", context.name)
        return 1
    _log.info("stopped")
    return 0


def _stop_on_signals(stopping: asyncio.Event, working: "asyncio.Future[int]") -> None:
    def stop() -> None:
        if stopping.is_set():
            working.cancel()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _limit_stop(stopping: asyncio.Event, working: "asyncio.Future[int]", grace_s: float) -> None:
    await stopping.wait()
    await asyncio.wait([working], timeout=grace_s)
    working.cancel()


async def _follow_supervisor(incoming: int, context: ProgramContext) -> None:
    """Read the supervisor's lines until the pipe ends, which means that it is gone or wants us to leave."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(incoming, "rb", buffering=0))
    try:
        while line := await reader.readline():
            told = decode_to_program(line)
            if isinstance(told, Answer):
                context.wishes.answered(told)
            else:
                context.members.replace(told.members, told.age_s, told.desired)
    except (HeadraceError, ValueError) as error:
        _log.error("the supervisor's pipe is broken: %s", error)
    finally:
        context.stopping.set()
