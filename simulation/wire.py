"""The wire thread of a simulated engine: one-sided reads with the manners that were measured on real links.

| | holder frozen | holder does not poll | partition | holder killed |
| --- | --- | --- | --- | --- |
| warm-up | waits, fails after 5 s | same | same | fails |
| read over TCP | waits for ever | waits for ever | waits | fails, late when its host went too |
| read over CMA | ends | ends; now and then bytes land but the end waits for a poll | ends | ends or fails |

Bytes are copied in two parts at two moments, as late as a real read may copy them: what the holder overwrites in
between is what arrives. A read that nobody waits for lands all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.messages import (
    AddPeer,
    DropPeer,
    PeerAdded,
    PeerFailed,
    Read,
    ReadDone,
    ReadFailed,
    Report,
    Serve,
)
from kv_transfer.transports.ranges import check_read
from simulation.local_engine import LocalEngine, pieces
from simulation.network import Network
from simulation.process import Process
from simulation.scenario import Scenario

WARM_TIMEOUT_S = 5.0
SILENT_S = 30.0  # until TCP gives up a host that went without a word
_AGAIN_S = 0.05

Bytes = NDArray[np.uint8]
WireCommand = Read | AddPeer | DropPeer | Serve


@dataclass(slots=True, eq=False)
class _Posted:
    """A read in progress. `half`: the first part has landed."""

    read: Read
    holder: "Wire"
    started: float
    needs_help: bool
    half: bool = False


class Wire:
    """Makes every transport call of one engine."""

    def __init__(
        self,
        process: Process,
        local: LocalEngine,
        agents: dict[str, "Wire"],
        network: Network,
        scenario: Scenario,
        report: Callable[[Report], None],
    ) -> None:
        self.process = process
        self.local = local
        self.base = process.loop.random.getrandbits(40) << 12  # where its pool begins: no real address, so runs replay
        self.serving = False
        self._agents = agents
        self._network = network
        self._scenario = scenario
        self._report = report
        self._peers: set[str] = set()
        self._warming: dict[str, float] = {}  # peer -> deadline
        self._posted: dict[int, _Posted] = {}
        self._told: set[int] = set()  # reads that have ended, while the word of it is on its way to the server

    @property
    def polls(self) -> bool:
        """Whether this side helps those who read from it."""
        return self.process.up and self.serving

    def in_progress(self, *, silent: bool) -> int:
        """Reads that the server has not heard the end of; `silent`: of those that have not ended, only the ones whose
        holder's host went without a word."""
        posted = sum(not silent or posted.holder.process.silent for posted in self._posted.values())
        return posted + len(self._told)

    def heard(self, report: Report) -> None:
        """A report has come to the server."""
        if isinstance(report, ReadDone | ReadFailed):
            self._told.discard(report.id)

    def take(self, command: WireCommand) -> None:
        """One command of the server."""
        match command:
            case Read():
                self._read(command)
            case AddPeer():
                self._add(command)
            case DropPeer():
                self._peers.discard(command.peer)
                self._warming.pop(command.peer, None)
            case Serve():
                self.serving = command.on

    def _add(self, command: AddPeer) -> None:
        holder = self._agents.get(command.peer)
        if holder is not None and holder.base != command.pool_address:
            self._report(PeerFailed(command.peer, "the pool is elsewhere"))
            return
        deadline = self.process.loop.now + WARM_TIMEOUT_S
        self._warming[command.peer] = deadline
        self.process.timer(self.process.loop.random.uniform(0.005, 0.02), partial(self._warm, command.peer, deadline))

    def _warm(self, peer: str, deadline: float) -> None:
        if self._warming.get(peer) != deadline:
            return
        holder = self._agents.get(peer)
        gone = holder is None or (holder.process.dead and not holder.process.silent)
        if gone or self.process.loop.now > deadline:
            del self._warming[peer]
            self._report(PeerFailed(peer, "the peer is gone" if gone else "the link was not warm in time"))
        elif holder is not None and holder.polls and not self._network.cut(self.process, holder.process):
            del self._warming[peer]
            self._peers.add(peer)
            self._report(PeerAdded(peer, self._scenario.tcp, 1.0))
        else:
            self.process.timer(_AGAIN_S, partial(self._warm, peer, deadline))

    def _read(self, read: Read) -> None:
        holder = self._agents.get(read.peer)
        if read.peer not in self._peers or holder is None:
            self._report(ReadFailed(read.id, "the peer is unknown, or its link is not warm"))
            return
        pool, staging = holder.local.memory.pool, self.local.memory.staging
        check_read(read.ranges, holder.base, pool.nbytes, staging, read.slot)  # raises: our own server never errs
        loop, scenario = self.process.loop, self._scenario
        seconds = loop.random.uniform(0.0002, 0.002)
        if loop.chance(scenario.read_slow):
            seconds += loop.random.choice((0.02, 0.2, 2.0, 6.0)) * loop.random.random()
        posted = self._posted[read.id] = _Posted(read, holder, loop.now, loop.chance(0.1))
        self.process.timer(seconds / 2, partial(self._progress, posted, seconds / 2))

    def _progress(self, posted: _Posted, seconds: float) -> None:
        """Half of the read's time is over, and then the other half."""
        loop, holder, read = self.process.loop, posted.holder, posted.read
        if holder.process.dead:
            self._holder_died(posted, seconds)
            return
        if self._scenario.tcp:
            stuck = not holder.polls or self._network.cut(self.process, holder.process)
        else:
            stuck = posted.half and posted.needs_help and not holder.polls
        if stuck:
            self.process.timer(_AGAIN_S, partial(self._progress, posted, seconds))
            return
        sources = _sources(posted)
        if not posted.half:
            posted.half = True
            self.local.land(read.slot, 0, sources[: len(sources) // 2])
            self.process.timer(seconds, partial(self._progress, posted, seconds))
        elif loop.chance(self._scenario.read_fail):
            self._end(ReadFailed(read.id, "the wire broke"))
        else:
            self._finish(posted)

    def _holder_died(self, posted: _Posted, seconds: float) -> None:
        loop, holder = self.process.loop, posted.holder
        if not self._scenario.tcp and loop.chance(0.5):
            self._finish(posted)  # its memory was still there
        elif holder.process.silent and loop.now - posted.started < SILENT_S:
            self.process.timer(1.0, partial(self._progress, posted, seconds))
        else:
            self._end(ReadFailed(posted.read.id, "the holder died"))

    def _finish(self, posted: _Posted) -> None:
        loop, read = self.process.loop, posted.read
        sources = _sources(posted)
        if posted.half:
            tail = sources[len(sources) // 2 :]
            self.local.land(read.slot, sum(s.nbytes for s in sources[: len(sources) // 2]), tail)
        else:
            self.local.land(read.slot, 0, sources)
        if loop.chance(self._scenario.read_flip):
            slot = self.local.memory.staging[read.slot]
            slot[loop.random.randrange(sum(size for _, size in read.ranges))] ^= 1 << loop.random.randrange(8)
            loop.log(f"{self.process.name}: read {read.id} arrives with a flipped bit")
        self._end(ReadDone(read.id, loop.now - posted.started))

    def _end(self, report: ReadDone | ReadFailed) -> None:
        del self._posted[report.id]
        self._told.add(report.id)
        self._report(report)


def _sources(posted: _Posted) -> list[Bytes]:
    """The holder's memory under a read, in pieces of a block."""
    size = posted.holder.local.memory.layout.block_bytes
    ranges = pieces(posted.holder.local.memory, posted.holder.base, posted.read.ranges)
    return [source[at : at + size] for source in ranges for at in range(0, source.nbytes, size)]
