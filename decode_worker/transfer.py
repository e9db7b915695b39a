"""What this worker knows of one hand-off in progress: its holder, its patience, its marks in time."""

from dataclasses import dataclass, field

from cluster.core.handoff_ends import JobEnd, Left
from cluster.core.keys import BlockKey, KeyChain, root_key
from cluster.stubs.common_pb2 import WorkerAddress
from decode_worker.attempts import Attempt
from decode_worker.pairs import Pair
from decode_worker.peers import Peer
from kv_transfer.handoff import HandOff
from kv_transfer.staging import Staging

MOST_OFFERS = 64  # remembered
POKE_S = 0.05  # a read that takes longer may need the holder to poll, whatever the warm-up showed


@dataclass(slots=True)
class Timeline:
    """Marks of one hand-off, in seconds on this worker's clock. What they measure is the pair's as well.

    `wire` and `verify` add up over reads, which overlap each other and prefill.
    """

    job: Pair | None = None  # with whom a job is under way
    job_sent: float = 0.0
    offered: bool = False  # by the present holder
    offers: list[tuple[int, float]] = field(
        default_factory=list
    )  # of the present holder: position, seconds since asked
    first_offer: float | None = None
    last_offer: float | None = None
    offer_wait: float = 0.0
    wire: float = 0.0
    verify: float = 0.0
    publish: float = 0.0
    exposed: float = 0.0
    kv_bytes: int = 0  # verified, as they travelled
    posted: dict[int, float] = field(default_factory=dict)  # reads
    copying: dict[int, float] = field(default_factory=dict)
    sources: dict[int, Pair] = field(default_factory=dict)  # of reads and copies
    gap_since: float | None = None  # verified blocks wait for one before them

    def asked(self, pair: Pair, now: float) -> None:
        """A job goes to this holder."""
        pair.sent += 1
        self.job, self.job_sent, self.offered = pair, now, False
        self.offers.clear()

    def left(self, how: JobEnd) -> None:
        """The job has ended, if one was under way."""
        if self.job is not None:
            self.job.jobs[how] += 1
            self.job = None

    def offer(self, until: int, now: float) -> None:
        """The holder offers blocks up to this position."""
        self.offers[MOST_OFFERS - 1 :] = []
        self.offers.append((until, now - self.job_sent))
        if self.first_offer is None:
            self.first_offer, self.offer_wait = now, now - self.job_sent
        if self.job is not None and not self.offered:
            self.job.offer_wait += now - self.job_sent
        self.offered, self.last_offer = True, now

    def post(self, read_id: int, now: float) -> None:
        """A read of what the present holder offered begins."""
        self.posted[read_id] = now
        if self.job is not None:
            self.sources[read_id] = self.job

    def drop(self, read_id: int) -> None:
        """Nobody waits for this read any more."""
        for marks in (self.posted, self.copying, self.sources):
            marks.pop(read_id, None)

    def read(self, read_id: int, now: float) -> None:
        """The read is over, and its copy begins."""
        seconds = now - self.posted.pop(read_id)
        self.wire += seconds
        self.copying[read_id] = now
        if read_id in self.sources:
            self.sources[read_id].wire += seconds

    def copied(self, read_id: int, kv_bytes: int, now: float) -> None:
        """The copy was judged; so many bytes are right."""
        seconds = now - self.copying.pop(read_id)
        self.verify += seconds
        self.kv_bytes += kv_bytes
        if (pair := self.sources.pop(read_id, None)) is not None:
            pair.verify += seconds
            pair.kv_bytes += kv_bytes

    def published(self, gap: bool, now: float) -> None:
        """What could be published is; with a `gap` verified blocks still wait."""
        if gap:
            self.gap_since = now if self.gap_since is None else self.gap_since
        elif self.gap_since is not None:
            self.publish += now - self.gap_since
            if self.job is not None:
                self.job.publish += now - self.gap_since
            self.gap_since = None

    def settled(self, now: float) -> None:
        """Everything is here: what prefill alone would have taken ended with the last offer."""
        self.exposed = now - self.last_offer if self.last_offer is not None else 0.0
        if self.job is not None:
            self.job.exposed += self.exposed
        self.left("ok")


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt's hand-off with its present holder."""

    attempt: Attempt
    handoff: HandOff
    candidates: list[WorkerAddress]
    peer: Peer | None = None
    tried: int = 0
    left: Left | None = None  # why its last holder was; None: it was not
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
    holders: dict[int, Peer] = field(default_factory=dict)  # of each read so far
    named: dict[str, list[BlockKey]] = field(default_factory=dict)  # the prompt's keys at holders of another KV dtype

    @property
    def has_read(self) -> bool:
        """Whether blocks of the present holder had to be read."""
        return any(holder is self.peer for holder in self.holders.values())

    def keys_at(self, peer: Peer, block_size: int) -> list[BlockKey]:
        """What this holder calls the prompt's full blocks: under the fingerprint that its hello was found to have."""
        if not peer.source or peer.hello is None:
            return self.handoff.keys
        if peer.source not in self.named:
            root = root_key(peer.hello.identity.fingerprint, salt=self.attempt.submit.salt)
            self.named[peer.source] = KeyChain(root, block_size).extend(self.attempt.prompt_ids)
        return self.named[peer.source]

    def leaves(self, worker: str, cause: Left, detail: str) -> None:
        """It goes on without this holder, which may have said more of it."""
        self.left = cause
        if cause != "unusable":
            self.timeline.left(cause)
        self.refusals.append(f"{worker}: {detail or cause}")

    def starved(self, staging: Staging, now: float, patience_s: float) -> bool:
        """Nothing has moved for too long, and it is the holder's turn.

        What it offered waits for no read, copy or slot of ours, or for its hung reads.
        """
        if now - self.progress_at <= max(patience_s, 3 * self.eta):
            return False
        if self.handoff.reads or self.peer is None:
            return False
        return not self.handoff.next_range(1) or staging.stuck(self.peer.name)
