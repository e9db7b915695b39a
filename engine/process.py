"""The engine process: a reader thread, the compute thread (main) and the wire thread (DESIGN §2).

1. `main` reads `--fd N`, the engine's end of a socket pair (engine/client.py), and asks the kernel to be killed when
   the parent dies. Ctrl-C is the server's business.
2. The reader thread takes frames off the socket: Read, AddPeer, DropPeer and Serve go to the wire thread, Prepare to
   the one for grammars (engine/grammars.py), the rest to main.
3. Init: load the model, touch and poison the memory, start the wire thread, register, answer Ready.
4. Step, Copy, Digest, Poison in the order they came, each answered as engine/messages.py says.
5. Shutdown or the end of the socket: leave in order. Anything unexpected: Fatal with its reason, exit code 1.
"""

import argparse
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, IntegrityError
from cluster.core.faults import Faults
from engine.channel import ChannelClosed, ChannelError, EnginePort, SocketPort
from engine.faults import RunStep, with_read_faults, with_step_faults
from engine.grammars import Grammars, GrammarThread
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    CopyDone,
    Digest,
    DigestDone,
    DropPeer,
    Fatal,
    FolderModel,
    Init,
    Poison,
    Prepare,
    Read,
    Ready,
    Report,
    Serve,
    Shutdown,
    Step,
)
from engine.model.loader import load_model, load_vocabulary, make_memory, sources
from engine.pool import Memory, run_copy
from engine.stepper import Stepper
from engine.wire import Transport
from engine.wire_thread import WireThread

MakeTransport = Callable[[str, dict[str, str], str], Transport]  # kind, options, agent name

_PR_SET_PDEATHSIG = 1
LEAVE_S = 5.0  # how long a step may run on after the server has gone

_log = logging.getLogger(__name__)


def main(make_transport: MakeTransport, arguments: Sequence[str] | None = None) -> int:
    """The program of a worker package's `engine_process` module. Returns the exit code."""
    parser = argparse.ArgumentParser(description="An engine process; started by its worker's server, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="the engine's end of a connected Unix socket")
    fd: int = parser.parse_args(arguments).fd
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    return run_engine(fd, make_transport)


def run_engine(fd: int, make_transport: MakeTransport) -> int:
    """Serve the socket `fd` until it ends. Returns the exit code: 0, or 1 after an unexpected failure."""
    # When the server has gone and a step does not end, there is nothing to save and nobody waits: leave at once.
    return Engine(SocketPort(socket.socket(fileno=fd)), make_transport, SystemClock(), lambda: os._exit(1)).serve()


def _die_with_parent() -> None:
    """SIGKILL when the thread that started this process ends. The end of the socket covers a parent already gone."""
    if sys.platform != "linux":
        return  # elsewhere the end of the socket is all there is
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


class Engine:
    """One rank's engine behind a port. `serve` is the main thread."""

    def __init__(
        self,
        port: EnginePort,
        make_transport: MakeTransport,
        clock: Clock,
        abandon: Callable[[], None],
        leave_s: float = LEAVE_S,
    ) -> None:
        """`abandon` is called, on the reader thread, when a step runs on `leave_s` after the port has ended."""
        self._port = port
        self._make_transport = make_transport
        self._clock = clock
        self._abandon = abandon
        self._leave_s = leave_s
        self._commands: queue.SimpleQueue[Command | BaseException | None] = queue.SimpleQueue()
        self._wire = WireThread(port.send, self._commands.put)
        self._left = threading.Event()
        self._memory: Memory | None = None
        self._run_step: RunStep | None = None
        self._grammars: GrammarThread | None = None

    def serve(self) -> int:
        """Obey until Shutdown or the end of the port. Returns the exit code."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            while (command := self._commands.get()) is not None and not isinstance(command, Shutdown):
                if isinstance(command, BaseException):
                    raise command
                self._obey(command)
            return 0
        except ChannelClosed:  # the server went while a report was on its way
            return 0
        except HeadraceError as error:  # a setting, a model, a transport: nothing that a stack of calls explains
            _log.error("the engine cannot go on: %s", error)
            self._tell_fatal(f"{type(error).__name__}: {error}")
            return 1
        except Exception as error:  # the guard of this loop: the server must hear why, then restart us
            _log.exception("the engine cannot go on")
            self._tell_fatal(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._wire.stop()
            self._left.set()
            self._port.close()

    def _tell_fatal(self, reason: str) -> None:
        try:
            self._port.send(Fatal(reason))
        except ChannelClosed:
            _log.warning("the server is gone, nobody hears of it")

    def _read(self) -> None:
        """The reader thread."""
        try:
            while (command := self._port.receive()) is not None:
                if isinstance(command, Read | AddPeer | DropPeer | Serve):
                    self._wire.submit(command)
                elif isinstance(command, Prepare) and self._grammars is not None:
                    self._grammars.submit(command)
                else:
                    self._commands.put(command)
        except ChannelError as error:
            self._commands.put(error)
        self._commands.put(None)
        if not self._left.wait(self._leave_s):
            self._abandon()

    def _obey(self, command: Command) -> None:
        if isinstance(command, Init):
            self._port.send(self._init(command))
            return
        if self._memory is None or self._run_step is None:
            raise IntegrityError(f"{type(command).__name__} before Init")
        for report in self._answer(command, self._run_step, self._memory):
            self._port.send(report)

    def _answer(self, command: Command, run_step: RunStep, memory: Memory) -> list[Report]:
        match command:
            case Step():
                return [run_step(command)]
            case Copy():
                started = self._clock.now()
                digests, converted = run_copy(memory, command)
                return [CopyDone(command.id, digests, self._clock.now() - started, converted)]
            case Digest():
                return [DigestDone(command.id, memory.digests(command.blocks))]
            case Poison():
                memory.poison(command.blocks)
                return []
            case _:
                raise IntegrityError(f"{type(command).__name__} is not for the compute thread")

    def _init(self, init: Init) -> Ready:
        if self._memory is not None:
            raise IntegrityError("a second Init")
        started = self._clock.now()
        faults = Faults(init.faults)
        model = load_model(init.model, init.block_size, init.threads)
        layout = model.layout
        source = init.model.converts_from if isinstance(init.model, FolderModel) else ""
        memory = make_memory(model, init.num_blocks, init.slots, init.slot_bytes, poison=init.poison, source=source)
        name, metadata = self._wire.start(
            lambda: with_read_faults(
                self._make_transport(init.transport, init.transport_options, init.agent), faults, self._clock
            ),
            memory.pool,
            memory.staging,
        )
        self._memory = memory
        grammars = Grammars(load_vocabulary(init.model, model))
        self._grammars = GrammarThread(grammars, self._port.send, self._commands.put)
        self._run_step = with_step_faults(Stepper(model, memory, self._clock, grammars).run, faults)
        return Ready(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            kv_dtype=layout.dtype,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_ids=list(model.eos_ids),
            fingerprint=model.fingerprint,
            pool_address=memory.pool_address,
            metadata=metadata,
            transport=name,
            load_s=self._clock.now() - started,
            sources=sources(init.model, init.block_size),
        )
