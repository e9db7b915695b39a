"""A simulated engine process: the real bytes, with a duration for every command on the virtual clock."""

from collections import deque
from collections.abc import Callable
from functools import partial

from engine.messages import AddPeer, Command, DropPeer, Fatal, Prepare, Read, Report, Serve, Step
from simulation.local_engine import LocalEngine
from simulation.loop import Loop, brief
from simulation.network import Network
from simulation.process import Process
from simulation.scenario import Scenario
from simulation.wire import Wire

_SOCKET_S = (0.00002, 0.0002)
SLOWEST_STEP_S = 4.0  # longer than usual by this
_COPY_S = (0.0001, 0.001)
_GRAMMAR_S = ((0.001, 0.01), (0.01, 0.3))  # to build one: milliseconds, seldom more


class SimEngine:
    """Commands in over an ordered socket, reports back over another; compute and wire run beside each other."""

    def __init__(
        self,
        server: Process,
        local: LocalEngine,
        agents: dict[str, Wire],
        network: Network,
        scenario: Scenario,
        reported: Callable[[Report], None],
    ) -> None:
        self.process = Process(server.loop, server.host, f"{server.name} engine")
        self.local = local
        self.wire = Wire(self.process, local, agents, network, scenario, self._report)
        self._server = server
        self._scenario = scenario
        self._reported = reported
        self._commands: deque[Command] = deque()
        self._busy = False
        self._in_at = 0.0
        self._out_at = 0.0

    @property
    def _loop(self) -> Loop:
        return self._server.loop

    def send(self, command: Command) -> None:
        """From the server. Nothing when the engine is gone."""
        self._in_at = max(self._in_at, self._loop.now + self._loop.random.uniform(*_SOCKET_S))
        self._loop.at(self._in_at, lambda: self.process.arrive(partial(self._take, command)))

    def fail(self) -> None:
        """An error of its own: it says so, and the server ends it."""
        self.process.arrive(partial(self._report, Fatal("the simulation wants it so")))

    def on_end(self, call: Callable[[], None]) -> None:
        """The engine has just died: `call` in the server, after the reports that had left."""
        self._out_at = max(self._out_at, self._loop.now + self._loop.random.uniform(*_SOCKET_S))
        self._loop.at(self._out_at, lambda: self._server.arrive(call))

    @property
    def computing(self) -> bool:
        """Whether a step or a copy is under way: what it may still write into is in use, wanted or not."""
        return self._busy

    def _take(self, command: Command) -> None:
        if self._loop.traced:
            self._loop.log(f"{self.process.name} > {brief(command)}")
        if isinstance(command, Read | AddPeer | DropPeer | Serve):
            self.wire.take(command)
        elif isinstance(command, Prepare):
            seconds = self._loop.random.uniform(*_GRAMMAR_S[self._loop.chance(0.1)])
            self.process.timer(seconds, partial(self._prepared, command))
        else:
            self._commands.append(command)
            self._next()

    def _prepared(self, command: Prepare) -> None:
        """The grammar thread is beside compute and wire, too."""
        self._report(self.local.grammars.prepare(command))

    def _next(self) -> None:
        if self._busy or not self._commands:
            return
        self._busy = True
        command = self._commands.popleft()
        self.process.timer(self._seconds(command), partial(self._finish, command))

    def _finish(self, command: Command) -> None:
        result = self.local.compute(command)
        if result is not None:
            self._report(result)
        self._busy = False
        self._next()

    def _seconds(self, command: Command) -> float:
        if not isinstance(command, Step):
            return self._loop.random.uniform(*_COPY_S)
        tokens = sum(len(row.tokens or [0]) for row in command.rows)
        seconds = (self._scenario.step_s + self._scenario.token_s * tokens) * self._loop.random.uniform(0.8, 1.2)
        if self._loop.chance(self._scenario.slow_step):
            seconds += self._loop.random.uniform(0.2, SLOWEST_STEP_S)  # a long chunk, or something is compiled
        return seconds

    def _report(self, report: Report) -> None:
        if self._loop.traced:
            self._loop.log(f"{self.process.name} < {brief(report)}")
        self._out_at = max(self._out_at, self._loop.now + self._loop.random.uniform(*_SOCKET_S))
        self._loop.at(self._out_at, lambda: self._server.arrive(partial(self._heard, report)))

    def _heard(self, report: Report) -> None:
        self.wire.heard(report)
        self._reported(report)
