"""What the parts of the decode core share: the books, the attempts, and the effects they want carried out."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.core.config import ClusterConfig
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.link_pb2 import FromDecodePeer
from cluster.stubs.session_pb2 import FromDecode
from decode_worker.attempts import Attempt
from decode_worker.effects import Effect, ToEngine, ToPrefill
from decode_worker.pairs import Pairs
from decode_worker.sessions import Sessions, closes, kept
from engine.batcher import Batcher
from engine.blocks import BlockBooks
from engine.layout import KVLayout
from engine.messages import Command, Poison
from kv_transfer.staging import Staging


@dataclass(frozen=True, slots=True)
class Facts:
    """What this worker's engine said when it was ready, and what the worker says of itself."""

    identity: WorkerIdentity
    layout: KVLayout
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]


@dataclass(slots=True)
class State:
    """One worker's brain: every part works on the same books."""

    config: ClusterConfig
    facts: Facts
    books: BlockBooks
    batcher: Batcher
    staging: Staging
    attempts: dict[str, Attempt] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    pairs: Pairs = field(default_factory=Pairs)
    draining: bool = False
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        interval = self.config.timing.emit_interval_s
        self.sessions = Sessions(self.facts.identity, self.effects, emit_interval_s=interval)

    @property
    def block_size(self) -> int:
        return self.facts.layout.block_size

    def to_engine(self, command: Command) -> None:
        """Send a command; what was recycled before it is poisoned first, so that old bytes are never read as new."""
        recycled = self.books.take_recycled()
        if recycled and self.config.engine.poison:
            self.effects.append(ToEngine(Poison(recycled)))
        self.effects.append(ToEngine(command))

    def to_router(self, attempt: Attempt, message: FromDecode) -> None:
        """Send to the attempt's router, and keep what it must hear even if its session breaks now."""
        if closes(message):
            attempt.closing = message
        elif kept(message):
            attempt.said.append(message)
        self.sessions.send(attempt.router, message)

    def to_prefill(self, peer: str, message: FromDecodePeer) -> None:
        self.effects.append(ToPrefill(peer, message))

    def take_effects(self) -> list[Effect]:
        """Everything wanted since the last call, in order."""
        effects = self.effects.copy()
        self.effects.clear()  # the same list for good: the sessions write to it as well
        return effects


def copy_owner(read_id: int) -> str:
    """Blocks under a copy belong to the copy as well, so that a cancel cannot free them under it."""
    return f"copy {read_id}"
