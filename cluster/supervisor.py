"""One program, kept running: spawn, hear, feed, restart, stop. No Ray here; cluster/ray_launcher.py makes it an actor.

1. spawn    the program in its own session, stdin and stdout piped, stderr appended to its log
2. hear     its ready line; every change of state is reported at once. What a router asks for goes to `fulfil`
3. feed     the members list each time it is told, at the start the last one, and answers, from a thread of its own: a
            frozen program never blocks anybody
4. end      it exited: sweep what is left of its session, wait (longer after each early death), spawn again
5. stop     SIGTERM, a bounded time to drain, SIGKILL

The thread that spawns lives as long as the supervisor, because Linux ties the program's life to that thread (see
`program.die_with_parent`). Waiting is always blocking on the kernel or on a condition: an idle supervisor uses no CPU.
"""

import io
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

import msgspec

from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError
from cluster.core.ids import new_epoch
from cluster.pipe import (
    MAX_LINE_BYTES,
    Answer,
    AnswerLine,
    Ask,
    Member,
    MembersLine,
    PipeError,
    Ready,
    Role,
    Wish,
    decode_from_program,
    encode,
)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
STEADY_S = 30.0
"""A program that was up this long, or has drained, is restarted at once; earlier deaths double the wait."""

MAX_WISHES = 8
_MAX_LOG_BYTES = 64 * 1024 * 1024
_log = logging.getLogger(__name__)

State = Literal["starting", "ready", "waiting", "stopped"]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What to run. `environment` is complete: nothing is inherited. `node` is Ray's id of the machine."""

    name: str
    role: Role
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path
    node: str = ""


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """A supervisor's whole truth. (supervisor, revision) orders what one supervisor said.

    `restarts` counts deaths, `early_deaths` those in a row before the program had been up for STEADY_S. A program that
    was ready and left with exit code 0 has drained: somebody asked it to, and it did not die.
    """

    name: str
    role: Role
    supervisor: int
    revision: int = 0
    state: State = "starting"
    ready: Ready | None = None
    pid: int | None = None
    restarts: int = 0
    early_deaths: int = 0
    last_exit: int | None = None
    node: str = ""


Report = Callable[[ProgramStatus], None]
Fulfil = Callable[[Wish], str | None]
"""Does what a router wishes, however long it takes; returns None, or why it could not be done. Whatever it raises is
logged, and the router hears that it went wrong."""


class Supervisor:
    """Keeps one program running in a thread of its own until `stop`. Thread-safe."""

    def __init__(
        self, spec: ProgramSpec, report: Report, clock: Clock | None = None, fulfil: Fulfil | None = None
    ) -> None:
        """`fulfil` is called in threads of its own, at most MAX_WISHES at a time; without it nothing can be asked."""
        self._spec = spec
        self._report = report
        self._fulfil = fulfil
        self._wishes = 0
        self._answers: deque[Answer] = deque()  # for the present life
        self._clock = clock or SystemClock()
        self._lock = threading.Condition()
        self._status = ProgramStatus(spec.name, spec.role, new_epoch(), node=spec.node)
        self._members = MembersLine(())
        self._told = 0  # how often; the same list again says that the controller lives
        self._told_at = self._clock.now()  # the last time; before the first, since when there is nothing to tell
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._keep_running, name=f"supervise-{spec.name}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def status(self) -> ProgramStatus:
        """What is known now."""
        with self._lock:
            return self._status

    def set_desired(self, desired: Mapping[Role, int] | None) -> None:
        """How many programs there should be; told with the next list of those there are."""
        with self._lock:
            self._members = MembersLine(self._members.members, desired=None if desired is None else dict(desired))

    def set_members(self, members: Sequence[Member]) -> None:
        """The cluster's programs, all of them; given to the program, and to its successors."""
        with self._lock:
            self._members = MembersLine(tuple(members), desired=self._members.desired)
            self._told += 1
            self._told_at = self._clock.now()
            self._lock.notify_all()

    def drain(self) -> None:
        """Let the program drain and start its successor; returns at once."""
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()

    def stop(self, patience_s: float) -> None:
        """Let the program drain, kill it after `patience_s`; returns when nothing of it is left. Idempotent."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
            process = self._process
        if process is not None:
            process.terminate()
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("%s did not stop in %.0f s: killing it", self._spec.name, patience_s)
                process.kill()
        self._thread.join()

    def _keep_running(self) -> None:
        while not self._stopping:
            started = self._clock.now()
            code = self._run_once()
            steady = self._clock.now() - started >= STEADY_S
            drained = code == 0 and self._status.ready is not None
            early = 0 if steady or drained else self._status.early_deaths + 1
            restarts = self._status.restarts + (0 if self._stopping or drained else 1)
            if not self._stopping:
                _log.warning("%s %s", self._spec.name, "has drained" if drained else f"ended with {code}")
            self._change(
                state="stopped" if self._stopping else "waiting",
                ready=None,
                pid=None,
                last_exit=code,
                restarts=restarts,
                early_deaths=early,
            )
            with self._lock:
                self._lock.wait_for(lambda: self._stopping, timeout=backoff_s(early))

    def _run_once(self) -> int | None:
        """One life of the program. Returns its exit status; None when it could not be started."""
        try:
            process = self._spawn()
        except OSError as error:
            _log.error("cannot start %s: %s", self._spec.name, error)
            return None
        helpers = [
            threading.Thread(target=work, args=(process,), name=f"{work.__name__}-{self._spec.name}", daemon=True)
            for work in (self._feed, self._hear)
        ]
        for helper in helpers:
            helper.start()
        try:
            return process.wait()
        finally:
            with self._lock:
                self._process = None
                self._lock.notify_all()
            _sweep_session(process.pid)
            for helper in helpers:
                helper.join()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            _rotate(self._spec.log_file)
            with self._spec.log_file.open("ab") as log:
                process = subprocess.Popen(
                    self._spec.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=dict(self._spec.environment),
                    bufsize=0,
                    start_new_session=True,
                )
            self._process = process
            self._answers.clear()
            if self._stopping:  # `stop` came just before and had no process to end
                process.terminate()
        self._change(state="starting", ready=None, pid=process.pid)
        return process

    def _hear(self, process: "subprocess.Popen[bytes]") -> None:
        """Follow the program's stdout to its end."""
        assert process.stdout is not None
        with io.BufferedReader(_raw(process.stdout)) as reader:
            while line := reader.readline(MAX_LINE_BYTES):
                try:
                    told = decode_from_program(line)
                    if isinstance(told, Ask):
                        self._take_ask(process, told)
                        continue
                    if (told.name, told.role) != (self._spec.name, self._spec.role):
                        raise PipeError(f"it calls itself {told.name} ({told.role})")
                except HeadraceError as error:
                    _log.error("killing %s: %s", self._spec.name, error)
                    process.kill()
                    return
                self._change(state="ready", ready=told)

    def _take_ask(self, process: "subprocess.Popen[bytes]", ask: Ask) -> None:
        """Raises PipeError when it comes from a program that has nothing to ask for."""
        if self._spec.role != "router":
            raise PipeError("only routers hear operators")
        if self._fulfil is None:
            self._answer(process, Answer(ask.number, "nobody here can do that"))
        elif self._wishes >= MAX_WISHES:
            self._answer(process, Answer(ask.number, f"{MAX_WISHES} other things are being done"))
        else:
            with self._lock:
                self._wishes += 1
            threading.Thread(target=self._do, args=(self._fulfil, process, ask), name="wish", daemon=True).start()

    def _do(self, fulfil: Fulfil, process: "subprocess.Popen[bytes]", ask: Ask) -> None:
        problem: str | None = "it went wrong here; the supervisor's log says how"
        try:
            problem = fulfil(ask.wish)
        except Exception:  # the guard of this thread: who asked waits for an answer, whatever happens
            _log.exception("%s asked for %s", self._spec.name, ask.wish)
        finally:
            with self._lock:
                self._wishes -= 1
            self._answer(process, Answer(ask.number, problem))

    def _answer(self, process: "subprocess.Popen[bytes]", answer: Answer) -> None:
        """To the life that asked; its successors know nothing of it."""
        with self._lock:
            if self._process is process:
                self._answers.append(answer)
                self._lock.notify_all()

    def _feed(self, process: "subprocess.Popen[bytes]") -> None:
        """Write answers and each members list that was told, with its age; lists that came while a write was stuck are
        skipped, the newest is not."""
        assert process.stdin is not None
        sent = -1
        with _raw(process.stdin) as pipe:
            while (found := self._next_news(process, sent)) is not None:
                news, sent = found
                line = memoryview(encode(news))
                try:
                    while line:  # an unbuffered pipe may take only a part
                        line = line[pipe.write(line) or 0 :]
                except OSError:  # it has just died
                    return

    def _next_news(self, process: "subprocess.Popen[bytes]", sent: int) -> tuple[MembersLine | AnswerLine, int] | None:
        """Wait for an answer, or a list told after the `sent`-th; with the number of the last list that is sent then.
        None once the process is gone."""
        with self._lock:
            self._lock.wait_for(lambda: self._process is not process or self._told != sent or self._answers)
            if self._process is not process:
                return None
            if self._answers:
                return AnswerLine(self._answers.popleft()), sent
            age_s = max(0.0, self._clock.now() - self._told_at)
            return msgspec.structs.replace(self._members, age_s=age_s), self._told

    def _change(self, **changes: object) -> None:
        with self._lock:
            self._status = replace(self._status, revision=self._status.revision + 1, **changes)  # type: ignore[arg-type]
            status = self._status
        self._report(status)


def backoff_s(early_deaths: int) -> float:
    """Seconds to wait before the next start, after so many early deaths in a row."""
    if early_deaths == 0:
        return 0.0
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(early_deaths - 1, 10)))


def _raw(pipe: IO[bytes]) -> io.FileIO:
    """What Popen gives with bufsize=0, by its real type."""
    assert isinstance(pipe, io.FileIO)
    return pipe


def _sweep_session(leader: int) -> None:
    """A program's children normally leave with it; whatever did not is ended here."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nothing left
        return
    _log.warning("killed what process %d had left behind", leader)


def _rotate(log_file: Path) -> None:
    """Keep one old log: a program that restarts for weeks must not fill the disk."""
    if log_file.exists() and log_file.stat().st_size > _MAX_LOG_BYTES:
        log_file.replace(log_file.with_suffix(".log.1"))
