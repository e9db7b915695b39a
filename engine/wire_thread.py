"""The wire thread: the one thread that owns the transport and makes every call to it (DESIGN §2).

1. `start` runs the transport's making and registering on the thread itself, and waits for the outcome.
2. Then it takes commands (Read, AddPeer, DropPeer, Serve) off its queue and reports what came of them.
3. While the transport is busy - reads or warm-ups in progress, or peers that need this side's help - it looks every
   0.2 ms; else it sleeps on its queue. It never spins, and an idle engine costs nothing.
4. `stop` lets it close the transport and waits for it.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from engine.messages import AddPeer, DropPeer, Read, Report, Serve
from engine.wire import Bytes, Transport

POLL_S = 0.0002

WireCommand = Read | AddPeer | DropPeer | Serve


class WireThread:
    """Runs a transport beside the steps. `submit` may be called from any thread, also before `start`."""

    def __init__(self, report: Callable[[Report], None], fail: Callable[[BaseException], None]) -> None:
        """`report` sends a report; `fail` is told of an error that nobody expected. Both are called on the thread."""
        self._report = report
        self._fail = fail
        self._queue: queue.SimpleQueue[WireCommand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, make: Callable[[], Transport], pool: Bytes, staging: Bytes) -> tuple[str, bytes]:
        """Make the transport, register memory. Returns its name and the agent metadata; raises what either raised."""
        ready: Future[tuple[str, bytes]] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, pool, staging, ready), name="wire", daemon=True)
        self._thread.start()
        return ready.result()

    def submit(self, command: WireCommand) -> None:
        """Hand over a command; it is answered by a report."""
        self._queue.put(command)

    def stop(self) -> None:
        """Close the transport and end the thread. No-op when it never started."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(
        self,
        make: Callable[[], Transport],
        pool: Bytes,
        staging: Bytes,
        ready: "Future[tuple[str, bytes]]",
    ) -> None:
        try:
            transport = make()
            metadata = transport.register(pool, staging)
        except Exception as error:  # whatever it is, it belongs to the thread that waits in `start`
            ready.set_exception(error)
            return
        ready.set_result((transport.name, metadata))
        try:
            self._loop(transport)
        except Exception as error:  # the guard of this loop: the engine must not live on with a dead wire
            self._fail(error)
        finally:
            transport.close()

    def _loop(self, transport: Transport) -> None:
        while True:
            try:
                command = self._queue.get(timeout=POLL_S if transport.busy else None)
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                self._obey(transport, command)
            for ended in transport.poll():
                self._report(ended)

    def _obey(self, transport: Transport, command: WireCommand) -> None:
        match command:
            case Read():
                transport.read(command.id, command.peer, command.ranges, command.slot)
            case AddPeer():
                transport.add_peer(command.peer, command.metadata, command.pool_address)
            case DropPeer():
                transport.drop_peer(command.peer)
            case Serve():
                transport.serve(command.on)
