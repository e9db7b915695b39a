"""What this worker knows of one hand-off in progress: its holder, its patience, its marks in time."""

from dataclasses import dataclass, field

from cluster.stubs.common_pb2 import WorkerAddress
from decode_worker.attempts import Attempt
from decode_worker.peers import Peer
from kv_transfer.handoff import HandOff


@dataclass(slots=True)
class Timeline:
    """Marks of one hand-off, in seconds on this worker's clock."""

    job_sent: float = 0.0
    first_offer: float | None = None
    last_offer: float | None = None
    offer_wait: float = 0.0
    wire: float = 0.0
    verify: float = 0.0
    posted: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt's hand-off with its present holder."""

    attempt: Attempt
    handoff: HandOff
    candidates: list[WorkerAddress]
    peer: Peer | None = None
    tried: int = 0
    refusals: list[str] = field(default_factory=list)
    accepted: bool = False
    eta: float = 0.0
    progress_at: float = 0.0
    asked: list[int] = field(default_factory=list)  # samples whose first token the holder was asked for
    first_known: bool = False
    prefill_done: bool = False
    cached_tokens: int = 0
    published: int = 0
    prefill_s: float = 0.0
    closed: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    digests: dict[int, bytes] = field(default_factory=dict)
