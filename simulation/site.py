"""What every simulated program finds around it: time, network, the agents of engines, who listens where."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from simulation.limits import SharedBook
from simulation.loop import Loop
from simulation.network import End, Network
from simulation.process import Process
from simulation.scenario import Scenario
from simulation.wire import Wire


class Violation(AssertionError):
    """An invariant does not hold."""


class Server(Protocol):
    """One life of a program that takes streams."""

    name: str
    process: Process

    def accept(self, kind: str, end: End) -> None:
        """A stream of this kind was opened: hold its server end."""


@dataclass(slots=True)
class Site:
    """One simulated data centre. `gone` hears of each program that has ended; `calm`: whether all workers are well."""

    loop: Loop
    network: Network
    scenario: Scenario
    limits: SharedBook | None = None
    agents: dict[str, Wire] = field(default_factory=dict)
    listening: dict[str, Server] = field(default_factory=dict)
    gone: Callable[[Server], None] = lambda _: None
    calm: Callable[[], bool] = lambda: True

    def reach(self, client: Process, address: str) -> Server | None:
        """The program at an address when it answers now."""
        server = self.listening.get(address)
        answers = server is not None and server.process.up and not self.network.cut(client, server.process)
        return server if answers else None

    def refuses(self, client: Process, address: str) -> bool:
        """Whether a connection is turned away at once, because nobody listens on a host that is up."""
        server = self.listening.get(address)
        return server is None or (server.process.dead and not server.process.silent)
