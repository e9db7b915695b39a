"""Prefill workers as this decode worker knows them: links, agents, and why one cannot be used."""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import WorkerAddress, WorkerIdentity
from cluster.stubs.link_pb2 import FromDecodePeer, PrefillHello, Warmed
from decode_worker.breaker import Breaker
from decode_worker.effects import Dial, HangUp
from decode_worker.state import State
from engine.messages import AddPeer, DropPeer, PeerAdded, PeerFailed

MAX_ADDRESS = 1 << 62  # with any block of an offer added it is still a 64-bit number
MAX_METADATA_BYTES = 1 << 20  # some kB are usual

REDIAL_S = 1.0
ASK_AGAIN_S = 1.0  # a holder polls for longer than that when it is asked to


class LinkState(Enum):
    DIALLING = auto()
    UP = auto()
    MISMATCH = auto()


@dataclass(slots=True)
class Peer:
    """One prefill worker in one life. `readable`: the engine knows its agent; `needs_polling`: its engine was told.

    `source`: the dtype of its KV where that is not ours: its blocks are converted.
    """

    name: str
    address: WorkerAddress
    link: LinkState = LinkState.DIALLING
    hello: PrefillHello | None = None
    readable: bool = False
    needs_polling: bool = False
    gb_per_s: float = 0.0  # what reads reached when the link was warmed
    reason: str = ""
    source: str = ""
    ask_again_at: float = 0.0
    waiting: list[FromDecodePeer] = field(default_factory=list)

    @property
    def block_bytes(self) -> int:
        """Of one of its blocks, as it said when the link was opened."""
        assert self.hello is not None
        return self.hello.block_bytes


class Peers:
    """All links of this worker, dialled when first needed."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._peers: dict[str, Peer] = {}
        self._members: dict[str, WorkerAddress] = {}
        self._missed: dict[str, float] = {}  # members without a link: when to dial them again
        self._breakers: dict[str, Breaker] = {}  # outlive links
        self._convicted: list[str] = []  # by name, of faults that no breaker has heard of yet

    def get(self, peer: str) -> Peer | None:
        return self._peers.get(peer)

    def reach(self, address: WorkerAddress) -> Peer:
        """The peer at this address and epoch, dialling it when there is no link yet."""
        name = agent_name(address.worker, address.epoch)
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name, address)
            self._state.effects.append(Dial(name, address))
        return peer

    def breaker(self, peer: Peer) -> Breaker:
        """The breaker of this pair, for as long as the peer lives."""
        return self._breakers.setdefault(peer.name, Breaker(self._state.config.handoff.breaker_failures))

    def convict(self, names: list[str]) -> None:
        """What these could not run, another worker can. It counts with the next `keep_up`, which knows the time."""
        self._convicted += names

    def members(self, addresses: list[WorkerAddress]) -> None:
        """Every prefill worker that exists, dialled before the first request needs it."""
        self._members = {agent_name(a.worker, a.epoch): a for a in addresses}
        self._missed = {name: at for name, at in self._missed.items() if name in self._members}
        for peer in [p for p in self._peers.values() if p.link is LinkState.MISMATCH and p.name not in self._members]:
            del self._peers[peer.name]
        for address in addresses:
            self.reach(address)
        living = self._members.keys() | self._peers.keys()
        self._breakers = {name: breaker for name, breaker in self._breakers.items() if name in living}

    def keep_up(self, now: float) -> None:
        """Dial members again whose link was lost, each after a pause of its own so that not all dial at once.

        Breakers learn who was convicted.
        """
        convicted, self._convicted = self._convicted, []
        for name in convicted:
            breaker = self._breakers.get(name)
            if breaker is not None and breaker.failed(now):
                self._state.counters["breaker_opened"] += 1
        for name, address in self._members.items():
            if name in self._peers:
                self._missed.pop(name, None)
            elif name not in self._missed:
                ours = self._state.facts.identity.epoch
                self._missed[name] = now + REDIAL_S * (0.5 + (ours ^ address.epoch) % 1024 / 1024)
            elif now >= self._missed[name]:
                del self._missed[name]
                self.reach(address)

    def send(self, peer: Peer, message: FromDecodePeer) -> None:
        """Send now, or as soon as the link is up."""
        if peer.link is LinkState.UP:
            self._state.to_prefill(peer.name, message)
        else:
            peer.waiting.append(message)

    def opened(self, name: str, hello: PrefillHello) -> str | None:
        """The link's first message. Returns why this pair cannot work, or None."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        peer.hello = hello
        peer.reason = self._difference(peer, hello) or ""
        if peer.reason:
            peer.link = LinkState.MISMATCH  # for as long as this life is a member: the same life never changes
            peer.waiting.clear()
            self._state.effects.append(HangUp(name))
            return peer.reason
        peer.link = LinkState.UP
        peer.source = source_of(self._state.facts.identity, hello.identity)
        self._state.to_engine(AddPeer(hello.agent, hello.agent_metadata, hello.pool_address))
        waiting, peer.waiting = peer.waiting, []
        for message in waiting:
            self._state.to_prefill(name, message)
        return None

    def closed(self, name: str) -> None:
        """The link is gone: a new one starts from nothing."""
        peer = self._peers.pop(name, None)
        if peer is not None and peer.hello is not None and peer.link is LinkState.UP:
            self._state.to_engine(DropPeer(peer.hello.agent))

    def warmed(self, report: PeerAdded) -> Peer | None:
        """The engine can read from this agent now; the holder is told whether our reads need its help."""
        peer = self._by_agent(report.peer)
        if peer is not None:
            peer.readable = True
            peer.needs_polling, peer.gb_per_s = report.needs_polling, report.gb_per_s
            message = Warmed(needs_polling=report.needs_polling, gb_per_s=report.gb_per_s)
            self._state.to_prefill(peer.name, FromDecodePeer(warmed=message))
        return peer

    def bandwidths(self) -> dict[int, float]:
        """GB/s by the epoch of each prefill worker that can be read from."""
        return {p.address.epoch: p.gb_per_s for p in self._peers.values() if p.readable and p.gb_per_s > 0}

    def living(self) -> set[str]:
        """Names of the prefill workers that exist, as far as is known here: members, and those with a link."""
        return {a.worker for a in self._members.values()} | {p.address.worker for p in self._peers.values()}

    def ask_to_poll(self, peer: Peer) -> None:
        """Reads from this peer hang: even a warm link over CMA may need the holder's help to end (measured)."""
        if not peer.needs_polling and peer.link is LinkState.UP:
            peer.needs_polling = True
            self._state.counters["holders_asked_to_poll"] += 1
            self._state.to_prefill(peer.name, FromDecodePeer(warmed=Warmed(needs_polling=True)))

    def help_to_end(self, name: str, now: float) -> None:
        """Reads that were given up still hold slots: have their holder poll, jobs or no jobs, until they have ended."""
        peer = self._peers.get(name)
        if peer is not None and peer.link is LinkState.UP and now >= peer.ask_again_at:
            peer.ask_again_at = now + ASK_AGAIN_S
            self._state.to_prefill(peer.name, FromDecodePeer(warmed=Warmed(needs_polling=True)))

    def unreadable(self, report: PeerFailed) -> Peer | None:
        """The engine cannot read from this agent: hang up, so that the next use dials and warms afresh."""
        peer = self._by_agent(report.peer)
        if peer is not None:
            del self._peers[peer.name]
            self._state.to_engine(DropPeer(report.peer))
            self._state.effects.append(HangUp(peer.name))
        return peer

    def _by_agent(self, agent: str) -> Peer | None:
        """Whose link is up under this agent's name; a peer that was dialled at its address for another is not it."""
        peer = self._peers.get(agent)
        return peer if peer is not None and peer.link is LinkState.UP else None

    def _difference(self, peer: Peer, hello: PrefillHello) -> str | None:
        theirs, ours = hello.identity, self._state.facts.identity
        if theirs.epoch != peer.address.epoch:
            return f"{theirs.worker} was restarted: epoch {theirs.epoch:016x}, expected {peer.address.epoch:016x}"
        if (difference := identity_difference(ours, theirs)) is not None:
            return difference
        layout = dataclasses.replace(self._state.facts.layout, dtype=theirs.layout.dtype)
        if hello.block_bytes != layout.block_bytes:
            return f"block_bytes: {layout.block_bytes} here, {hello.block_bytes} there"
        if hello.agent != peer.name:
            return f"agent: {peer.name} expected, {hello.agent[:80]!r} there"
        if hello.pool_address > MAX_ADDRESS or len(hello.agent_metadata) > MAX_METADATA_BYTES:
            return "pool_address or agent_metadata is larger than anything real"
        return None


def identity_difference(ours: WorkerIdentity, theirs: WorkerIdentity) -> str | None:
    """The first field that keeps two workers from exchanging KV, with both values (FAULTS C06, C07, F08)."""
    if ours.protocol != theirs.protocol:
        return f"protocol: {ours.protocol} here, {theirs.protocol} there"
    source = source_of(ours, theirs)
    for name in ("layers", "kv_heads", "head_dim", "block_size", "dtype"):
        same = getattr(ours.layout, name) == getattr(theirs.layout, name)
        if not same and not (name == "dtype" and source):
            return f"{name}: {getattr(ours.layout, name)} here, {getattr(theirs.layout, name)} there"
    expected = ours.sources[source] if source else ours.fingerprint
    if expected != theirs.fingerprint:
        return f"fingerprint: {expected.hex()[:12]} here, {theirs.fingerprint.hex()[:12]} there"
    return None


def source_of(ours: WorkerIdentity, theirs: WorkerIdentity) -> str:
    """The dtype of their KV where it is another than ours and one that is converted here, else ""."""
    theirs_in = theirs.layout.dtype
    return theirs_in if theirs_in != ours.layout.dtype and theirs_in in ours.sources else ""
