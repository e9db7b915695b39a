"""In-memory streams with the faults of real ones (a gRPC stream over TCP).

- Each direction keeps its order and loses no single message; streams among each other have no order.
- A stream breaks as a whole: what was under way is lost, and the two ends learn of it at different times.
- A killed process closes its streams (what it had sent may still arrive); when its whole host goes, there is silence.
- Between partitioned hosts everything waits. If that lasts, keepalive closes both ends, each in its own time.
- A frozen process answers no keepalive: the other end closes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.stubs.watch_pb2 import WatchEvent
from simulation.loop import Loop, brief
from simulation.process import Condition, Process

KEEPALIVE_S = (10.0, 20.0)  # between these many seconds of silence gRPC closes a connection (cluster/rpc.py)

Receive = Callable[[object], None]
Closed = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _End:
    """The orderly end of a direction."""

    reason: str


@dataclass(slots=True, eq=False)
class End:
    """One end of a stream, held by one process. `received` and `closed` are called in that process."""

    stream: "Stream"
    process: Process
    received: Receive
    closed: Closed
    open: bool = True
    last_at: float = 0.0  # when the newest message from here arrives there
    sent: int = 0
    parked: dict[int, object] = field(default_factory=dict)  # by number: waiting for a partition to heal

    def send(self, message: object) -> None:
        """Never waits. Nothing when this end is closed."""
        if self.open:
            self.stream.carry(self, message)

    def close(self, reason: str) -> None:
        """Leave in order: what was sent still arrives. Nothing is heard any more, not even `closed`."""
        if self.open:
            self.stream.carry(self, _End(reason))
            self.open = False
            self.stream.forget()


class Stream:
    """A connection between a client process and a server process."""

    def __init__(self, network: "Network", kind: str, client: Process, server: Process) -> None:
        self.network = network
        self.kind = kind
        self.broken = False
        self.client = End(self, client, _nobody, _nobody)
        self.server = End(self, server, _nobody, _nobody)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.client.process.name}>{self.server.process.name}"

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def touches(self, *hosts: str) -> bool:
        """Whether each of these hosts is at one end."""
        return set(hosts) <= {self.client.process.host, self.server.process.host}

    def carry(self, sender: End, message: object) -> None:
        """Put a message on its way, behind those before it."""
        if self.broken:
            return
        sender.sent += 1
        self._go(sender, sender.sent, message)

    def heal(self) -> None:
        """What waited for the network goes on its way."""
        for end in (self.client, self.server):
            parked, end.parked = end.parked, {}
            for number in sorted(parked):
                self._go(end, number, parked[number])

    def break_up(self, reason: str, slowest_s: float) -> None:
        """The connection is gone: messages under way are lost, each end notices within `slowest_s`."""
        self.broken = True
        for end in (self.client, self.server):
            self.lose(end, reason, self.network.loop.random.uniform(0, slowest_s))

    def lose(self, end: End, reason: str, after_s: float) -> None:
        """This end notices after a while that the connection is gone."""
        self.network.loop.after(after_s, partial(self._notice, end, reason))

    def forget(self) -> None:
        """Nobody holds an end any more."""
        if not self.client.open and not self.server.open:
            self.network.streams.pop(self, None)

    def _go(self, sender: End, number: int, message: object) -> None:
        if sender.parked or self.network.cut(sender.process, self.other(sender).process):
            sender.parked[number] = message
            return
        loop = self.network.loop
        sender.last_at = max(sender.last_at, loop.now + self.network.latency())
        loop.at(sender.last_at, partial(self._deliver, sender, number, message))

    def _deliver(self, sender: End, number: int, message: object) -> None:
        receiver = self.other(sender)
        if self.broken:
            return
        if sender.parked or self.network.cut(sender.process, receiver.process):
            sender.parked[number] = message
        elif not receiver.open:
            self.lose(sender, "the peer has left", self.network.latency())
        else:
            self.network.arrived(self, receiver, message)
            receiver.process.arrive(partial(self._take, receiver, message))

    def _take(self, receiver: End, message: object) -> None:
        if not receiver.open:
            return
        if isinstance(message, _End):
            self._close(receiver, message.reason)
        else:
            receiver.received(message)

    def _notice(self, end: End, reason: str) -> None:
        if end.open:
            end.process.arrive(lambda: self._close(end, reason) if end.open else None)

    def _close(self, end: End, reason: str) -> None:
        end.open = False
        self.forget()
        end.closed(reason)


class Network:
    """All streams, all partitions. `latency` and `watching` belong to the scenario."""

    def __init__(self, loop: Loop, latency: Callable[[], float]) -> None:
        self.loop = loop
        self.latency = latency
        self.streams: dict[Stream, None] = {}  # in the order in which they were made
        self.watching: Callable[[], None] = lambda: None  # called before each message is taken
        self._cuts: dict[frozenset[str], int] = {}
        self._made = 0

    def connect(self, kind: str, client: Process, server: Process) -> Stream:
        """A new stream. The ends' `received` and `closed` are set by their owners before anything is sent."""
        stream = Stream(self, kind, client, server)
        self.streams[stream] = None
        return stream

    @property
    def whole(self) -> bool:
        """Whether there is no partition."""
        return not self._cuts

    def cut(self, one: Process, other: Process) -> bool:
        """Whether nothing passes between these two now."""
        return bool(self._cuts) and frozenset((one.host, other.host)) in self._cuts

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Nothing passes between two hosts for a while."""
        pair, self._made = frozenset((one, other)), self._made + 1
        self._cuts[pair] = self._made
        self.loop.after(seconds, partial(self._heal, pair, self._made))
        for stream in list(self.streams):
            if stream.touches(one, other):
                for end in (stream.client, stream.server):
                    when = self.loop.random.uniform(*KEEPALIVE_S)
                    self.loop.after(when, partial(self._keepalive, stream, end, pair, self._made))

    def frozen(self, process: Process) -> None:
        """A process has just been frozen: who talks to it will miss its keepalive answers."""
        for stream, end in self._of(process):
            when = self.loop.random.uniform(*KEEPALIVE_S)
            self.loop.after(when, partial(self._unanswered, stream, end, process.episode))

    def died(self, process: Process) -> None:
        """A process has just died: its streams close, or fall silent with its host."""
        for stream, end in list(self._of(process)):
            other = stream.other(end)
            if process.silent:
                stream.lose(other, "keepalive", self.loop.random.uniform(*KEEPALIVE_S))
                stream.broken = True
            elif self.loop.chance(0.5):
                stream.broken = True
                stream.lose(other, "connection reset", self.latency())
            else:
                stream.carry(end, _End("the peer died"))
            end.open = False
            stream.forget()

    def arrived(self, stream: Stream, receiver: End, message: object) -> None:
        """A message is about to be taken: the moment at which faults like to strike."""
        if self.loop.traced and not isinstance(message, _End | WatchEvent):
            self.loop.log(f"{stream.name} {'>' if receiver is stream.server else '<'} {brief(message)}")
        self.watching()

    def _of(self, process: Process) -> list[tuple[Stream, End]]:
        return [(s, end) for s in self.streams for end in (s.client, s.server) if end.process is process]

    def _heal(self, pair: frozenset[str], number: int) -> None:
        if self._cuts.get(pair) == number:
            del self._cuts[pair]
            self.loop.log(f"healed: {' and '.join(sorted(pair))}")
            for stream in list(self.streams):
                if stream.touches(*pair):
                    stream.heal()

    def _keepalive(self, stream: Stream, end: End, pair: frozenset[str], number: int) -> None:
        if self._cuts.get(pair) == number:
            stream.broken = True
            stream.lose(end, "keepalive", 0.0)
            stream.lose(stream.other(end), "keepalive", self.loop.random.uniform(*KEEPALIVE_S))

    def _unanswered(self, stream: Stream, end: End, episode: int) -> None:
        process = end.process
        if process.condition is Condition.FROZEN and process.episode == episode:
            stream.broken = True
            stream.lose(stream.other(end), "keepalive", 0.0)
            stream.lose(end, "keepalive", 0.0)


def _nobody(_: object) -> None:
    raise AssertionError("an end of a stream that nobody holds")
