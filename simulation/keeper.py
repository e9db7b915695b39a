"""What keeps one stream of a simulated router up: the rules of router/links.py on the virtual clock."""

from collections.abc import Callable
from functools import partial

from router.effects import StreamClosed
from simulation.network import End
from simulation.process import Process
from simulation.site import Site

CONNECT_S = 3.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = {"watch": 3.0, "session": 0.5}
_HEALTHY_S = 5.0


class Keeper:
    """Connect, serve until it ends, say so, wait with backoff, again. `opened` gets the client end."""

    def __init__(
        self,
        site: Site,
        process: Process,
        address: str,
        kind: str,
        opened: Callable[[End], None],
        received: Callable[[object], None],
        closed: Callable[[StreamClosed], None],
    ) -> None:
        self.address = address
        self.kind = kind
        self._site = site
        self._process = process
        self._on = (opened, received, closed)
        self._life = 0  # counts connections and drops: what belongs to an earlier one is not reported
        self._delay_s = 0.0
        self._began: float | None = None
        self._end: End | None = None

    def open(self) -> None:
        """Start connecting, after the present backoff."""
        self._life += 1
        self._began = None
        delay = self._delay_s * self._site.loop.random.uniform(0.5, 1.0)
        self._process.timer(delay, partial(self._connect, self._life))

    def reopen(self) -> None:
        """Drop the present stream and connect again."""
        self.close()
        self._back_off()
        self.open()

    def close(self) -> None:
        """End the stream; what was sent before still arrives."""
        self._life += 1
        end, self._end = self._end, None
        if end is not None:
            end.close("the client left")

    def send(self, message: object) -> None:
        """On the stream that is up; without one it is dropped."""
        if self._end is not None:
            self._end.send(message)

    def _connect(self, life: int) -> None:
        if life == self._life:
            self._began = self._site.loop.now
        self._try(life, self._site.loop.now)

    def _try(self, life: int, began: float) -> None:
        if life != self._life:
            return
        server = self._site.reach(self._process, self.address)
        if server is not None:
            stream = self._site.network.connect(self.kind, self._process, server.process)
            self._end = stream.client
            opened, received, _ = self._on
            stream.client.received = lambda message: received(message) if life == self._life else None
            stream.client.closed = partial(self._ended, life, began)
            server.accept(self.kind, stream.server)
            opened(stream.client)
        elif self._site.refuses(self._process, self.address):
            self._ended(life, began, "nobody takes the connection")
        elif self._site.loop.now - began >= CONNECT_S:
            self._ended(life, began, f"no connection within {CONNECT_S:g} s")
        else:
            self._process.timer(self._site.loop.random.uniform(0.1, 0.5), partial(self._try, life, began))

    def _ended(self, life: int, began: float, reason: str) -> None:
        if life != self._life:
            return
        self._end = None
        self._back_off()
        self._on[2](StreamClosed(reason))
        if life == self._life:
            self.open()

    def _back_off(self) -> None:
        if self._began is not None and self._site.loop.now - self._began >= _HEALTHY_S:
            self._delay_s = 0.0
        self._delay_s = min(_LONGEST_DELAY_S[self.kind], max(_FIRST_DELAY_S, self._delay_s * 2))
