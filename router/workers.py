"""The router's view of the workers: who they are, whether they may get work, and what they hold.

One `WorkerView` per address, fed by two streams:

1. *Connecting.* A watch is asked for. Nothing is known, nothing is assumed.
2. *Known.* The live Hello says role, name, epoch, layout, fingerprint and limits; nothing else is a source for these.
   A new epoch on the same address is a new peer: everything known of the old one is dropped.
3. *Cache.* What it has cached is in the prefix index, under a number of its own that it gets with every Hello.
4. *Starting / ready / draining.* As the worker's own Status says, twice a second. A decode worker also needs its
   session.
5. *Suspect.* Its watch is silent for longer than `suspect_s`, or than it usually is (rhythm.py): no new work, but what
   runs goes on while its session talks. When that has been silent for as long, the worker is lost, which the
   dispatcher acts upon.
6. *Gone.* A stream closed: back to connecting until it is up again.

What this router sent and the worker's Status may not show yet is kept as bookings: one per attempt and worker, owned by
the attempt, and left out of the sums once a Status has come after the worker acknowledged the work (FAULTS P03).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from cluster.core.errors import Unavailable
from cluster.core.keys import KEY_BYTES, BlockKey
from cluster.stubs.watch_pb2 import Status, WatchEvent, WatchHello
from router.facts import NOBODY, Facts, read_hello
from router.figures import pairs_json
from router.health import Health
from router.lives import Lives
from router.loads import Report, lend, queue_now
from router.placement import Shape, Snapshot, WorkerLoad, describe_mismatch, pairable
from router.prefix_index import PrefixIndex
from router.requests import Limits
from router.rhythm import Rhythm

BOTH_GONE_S = 1.0  # a worker whose session and watch have both broken is lost after this

KeysOf = Callable[[Shape], list[BlockKey]]
_Worker = TypeVar("_Worker")
Pools = tuple[list[_Worker], list[_Worker]]
"""Decode workers, and prefill workers."""


@dataclass(slots=True)
class Booking:
    """What one attempt brings to one worker, since `at`. `tokens`: of its prompt, to be computed there."""

    tokens: int
    blocks: int
    sequences: int
    context: int = 0  # positions of KV that its streams will hold
    at: float = 0.0
    acknowledged: bool = False
    reported: bool = False  # a Status came after the acknowledgement: the worker counts it itself


@dataclass(slots=True)
class WatchState:
    open: bool = False
    sequence: int = 0
    last_seen: float = 0.0


@dataclass(slots=True)
class SessionState:
    wanted: bool = False  # the shell was asked to keep one up
    open: bool = False
    epoch: int = 0  # from the worker's Hello on this session; 0 before it came
    last_seen: float = 0.0
    broken_at: float | None = None  # since then attempts wait for it to come back


class WorkerView:
    """One address. Times are the router's monotonic seconds."""

    def __init__(self, address: str, index: PrefixIndex, heartbeat_s: float) -> None:
        self.address = address
        self.index = index
        self.number: int | None = None  # in the index; None: nothing is known of its cache
        self.member = True
        self.facts = NOBODY
        self.report: Report | None = None
        self.free_blocks = 0
        self.lost = False  # it said so itself; true until a new epoch
        self.watch = WatchState()
        self.session = SessionState()
        self.rhythm = Rhythm(heartbeat_s)
        self.health = Health()
        self.bookings: dict[str, Booking] = {}

    @property
    def name(self) -> str:
        return self.facts.name or self.address

    @property
    def epoch(self) -> int:
        return self.facts.epoch

    @property
    def role(self) -> str:
        return self.facts.role

    def on_watch(self, event: WatchEvent, now: float) -> bool:
        """Take one event. Returns False when events were lost, or make no sense: the watch must be opened again."""
        kind = event.WhichOneof("event")
        if event.sequence != self.watch.sequence + 1 or (kind == "hello") != (event.sequence == 1):
            return False
        packed = getattr(event, kind).keys if kind in ("snapshot", "stored", "removed") else b""
        if len(packed) % KEY_BYTES:
            return False
        self.watch.sequence = event.sequence
        self.watch.last_seen = now
        if kind == "hello":
            self._on_hello(event.hello)
        elif kind == "status":
            self._on_status(event.status, now)
        elif packed and self.number is not None:
            (self.index.remove if kind == "removed" else self.index.store)(self.number, packed)
        return True

    def forget_cache(self) -> None:
        """What was known of it is void."""
        if self.number is not None:
            self.index.leave(self.number)
            self.number = None

    def new_peer(self) -> None:
        """Another process answers here now: nothing that its predecessor did counts any more."""
        self.lost = False
        self.health = Health()
        self.rhythm = self.rhythm.of_another_life()

    def watch_closed(self) -> None:
        self.watch.open = False
        self.watch.sequence = 0
        self.report = None

    def session_closed(self) -> None:
        self.session.open = False
        self.session.epoch = 0

    def unreachable(self, now: float, patience_s: float) -> bool:
        """Whether its broken session has been away for too long; with the watch gone as well, soon."""
        broken_at = self.session.broken_at
        limit = patience_s if self.watch.open else min(BOTH_GONE_S, patience_s)
        return broken_at is not None and now - broken_at > limit

    def _on_hello(self, hello: WatchHello) -> None:
        self.facts = read_hello(hello)
        self.forget_cache()
        self.number = self.index.join(self.facts.num_blocks)
        self.watch.open = True

    def _on_status(self, status: Status, now: float) -> None:
        self.report = Report(status, now)
        self.rhythm.beat(now)
        self.free_blocks = status.free_blocks
        for booking in self.bookings.values():
            booking.reported = booking.reported or booking.acknowledged

    @property
    def status(self) -> Status | None:
        """What it said of itself last."""
        return self.report.status if self.report is not None else None

    def unbook(self, attempt_id: str) -> int:
        """This attempt brings nothing to this worker any more. Returns the positions it was to compute."""
        booking = self.bookings.pop(attempt_id)
        tokens = booking.tokens
        self.computed(booking)
        return tokens

    def computed(self, booking: Booking) -> None:
        """Nothing of this prompt is left to be computed here."""
        if booking.reported and booking.tokens and self.report is not None:
            self.report.ended += 1
        booking.tokens = 0

    def last_seen(self) -> float:
        return max(self.watch.last_seen, self.session.last_seen)

    def session_ready(self) -> bool:
        return self.session.open and self.session.epoch == self.epoch != 0

    def state(self, now: float, suspect_s: float) -> str:
        """connecting, mismatch: why, lost, suspect, starting, draining, or ready."""
        if not self.watch.open:
            return "connecting"
        if self.facts.mismatch:
            return f"mismatch: {self.facts.mismatch}"
        if self.lost:
            return "lost"
        if self.role == "decode" and not self.session_ready():
            return "connecting"
        if now - self.watch.last_seen > self.rhythm.patience_s(suspect_s):
            return "suspect"
        status = self.status
        if status is None or not status.ready:
            return "starting"
        return "draining" if status.draining or not self.member else "ready"

    def load(self, now: float) -> WorkerLoad:
        """This worker for placement, without any prefix. Raises Unavailable before its first Status."""
        facts, report = self.facts, self.report
        if report is None:
            raise Unavailable(f"{self.address} is not ready")
        blocks = active = context = 0  # of what no status shows yet
        unread: list[tuple[int, float, bool]] = []
        for booking in self.bookings.values():
            if not booking.reported:
                blocks += booking.blocks
                active += booking.sequences
                context += booking.context
            if booking.tokens:
                unread.append((booking.tokens, booking.at, booking.reported))
        room = self.free_blocks - blocks
        if now < self.health.refused_until:
            room = min(room, self.health.refused_blocks - 1)
        return WorkerLoad(
            address=self.address,
            name=self.name,
            epoch=self.epoch,
            shape=facts.shape,
            max_context=facts.max_context,
            num_blocks=facts.num_blocks,
            rates=report.rates,
            queue=queue_now(report, unread, now, alone=self.role == "prefill"),
            window_tokens=report.status.window_tokens,
            active=report.active + active,
            context=report.context + context,
            room_blocks=room,
            cooling=self._cooling(now),
        )

    def _cooling(self, now: float) -> bool:
        """Failing: until its pause is over, and then while one request tries it out. Prefill: refusing work."""
        if self.role == "prefill":
            return now < self.health.refused_until
        return self.health.failures > 0 and (now < self.health.cooling_until or bool(self.bookings))


class Workers:
    """All workers, and the questions that concern more than one."""

    def __init__(self, suspect_s: float, heartbeat_s: float, index: PrefixIndex) -> None:
        self.suspect_s = suspect_s
        self._heartbeat_s = heartbeat_s
        self.index = index
        self.by_address: dict[str, WorkerView] = {}
        self.lives = Lives()
        self._limits: tuple[Pools[Facts], Limits] | None = None  # what fitted these last time

    def get(self, address: str) -> WorkerView | None:
        return self.by_address.get(address)

    def add(self, address: str) -> None:
        """A worker of which nothing is known yet."""
        self.by_address[address] = WorkerView(address, self.index, self._heartbeat_s)

    def remove(self, worker: WorkerView) -> None:
        worker.forget_cache()
        del self.by_address[worker.address]

    def forget_the_gone(self, now: float) -> None:
        """Of those who are not here any more, only the last are remembered."""
        self.lives.forget((view.name for view in self.by_address.values()), now)

    def ready(self, role: str, now: float) -> list[WorkerView]:
        """Workers of this role that may get new work."""
        return [w for w in self.by_address.values() if w.role == role and w.state(now, self.suspect_s) == "ready"]

    def _ready_pools(self, now: float) -> "Pools[WorkerView]":
        ready = [w for w in self.by_address.values() if w.state(now, self.suspect_s) == "ready"]
        return [w for w in ready if w.role == "decode"], [w for w in ready if w.role == "prefill"]

    def loads(self, now: float) -> Snapshot:
        """Every worker that may get new work, without any prefix."""
        decode, prefill = self._ready_pools(now)
        return lend([w.load(now) for w in decode], [w.load(now) for w in prefill])

    def for_request(self, loads: Snapshot, keys_of: KeysOf, without: set[str]) -> Snapshot:
        """`loads` with the prefix hits of one request. `without`: workers kept free for somebody else.

        A prefill worker of these is there, and takes nothing: what waits for it is read by no decode worker instead.
        """
        depths: dict[tuple[Shape, int], dict[int, int]] = {}

        def hit(load: WorkerLoad) -> WorkerLoad:
            worker = self.by_address[load.address]
            stride = worker.facts.routing_stride
            kind = (load.shape, stride)
            if kind not in depths:
                depths[kind] = self.index.match(keys_of(load.shape)[stride - 1 :: stride])
            depth = 0 if worker.number is None else depths[kind].get(worker.number, 0)
            return replace(load, cached_tokens=depth * stride * load.block_size) if depth else load

        decode = tuple(hit(load) for load in loads.decode if load.address not in without)
        prefill = (replace(load, cooling=True) if load.address in without else load for load in loads.prefill)
        return Snapshot(decode, tuple(hit(load) for load in prefill))

    def limits(self, now: float) -> Limits:
        """What fits. Raises Unavailable, naming why, while no pair of workers is ready.

        Every request asks for it before it is queued: it looks at what workers are, not at what they have to do.
        """
        ready_decode, ready_prefill = self._ready_pools(now)
        decode, prefill = known = [w.facts for w in ready_decode], [w.facts for w in ready_prefill]
        if self._limits is None or self._limits[0] != known:
            self._limits = known, self._limits_of(decode, prefill, now)
        return self._limits[1]

    def _limits_of(self, decode: list[Facts], prefill: list[Facts], now: float) -> Limits:
        if not decode:
            raise Unavailable("no decode worker is ready")
        paired = pairable(decode, prefill)
        if not paired:
            raise Unavailable(f"no prefill worker fits a decode worker: {describe_mismatch(self.loads(now))}")
        max_context = max(d.max_context for d in paired)
        if prefill:
            max_context = min(max_context, max(p.max_context for p in prefill))
        largest = max(paired, key=lambda d: d.pool_tokens)
        return Limits(
            max_context=max_context,
            pool_tokens=largest.pool_tokens,
            block_size=largest.shape.layout[3],
            vocab_size=largest.vocab_size,
            eos_ids=largest.eos_ids,
        )

    def silent(self, now: float) -> list[WorkerView]:
        """Workers that look connected, but were silent on every stream for so long that they count as lost."""
        connected = (w for w in self.by_address.values() if w.watch.open or w.session.open)
        return [w for w in connected if now - w.last_seen() > w.rhythm.patience_s(self.suspect_s)]

    def forgive(self, gap_s: float, now: float) -> None:
        """This process itself slept for `gap_s` until now: nobody can be blamed for silence in that time."""
        for worker in self.by_address.values():
            worker.rhythm.forgive(gap_s, now)
            worker.watch.last_seen += gap_s
            worker.session.last_seen += gap_s
            if worker.session.broken_at is not None:
                worker.session.broken_at += gap_s

    def describe(self, now: float) -> list[dict[str, object]]:
        """Every worker for people and metrics (JSON-able)."""
        rows = []
        for worker in self.by_address.values():
            status = worker.status or Status()
            rows.append(
                {
                    "address": worker.address,
                    "worker": worker.facts.name,
                    "role": worker.role,
                    "epoch": f"{worker.epoch:016x}",
                    "state": self._described_state(worker, now),
                    "blocks": worker.facts.num_blocks,
                    "free_blocks": worker.free_blocks,
                    "cached_keys": 0 if worker.number is None else self.index.count(worker.number),
                    "running": status.running,
                    "waiting": status.waiting,
                    "queued_tokens": status.queued_tokens,
                    "attempts": len(worker.bookings),
                    "restarts": self.lives.restarts(worker.name),
                    "pairs": pairs_json(status),
                    "gauges": dict(status.gauges),
                    "counters": dict(status.counters),
                }
            )
        return rows

    def _described_state(self, worker: WorkerView, now: float) -> str:
        state = worker.state(now, self.suspect_s)
        if state != "ready":
            return state
        other = "prefill" if worker.role == "decode" else "decode"
        peers = self.ready(other, now)
        pairs = [(worker, peer) if worker.role == "decode" else (peer, worker) for peer in peers]
        if not pairs or any(pairable([decode.facts], [prefill.facts]) for decode, prefill in pairs):
            return state
        decode, prefill = pairs[0]
        return f"mismatch: {describe_mismatch(Snapshot((decode.load(now),), (prefill.load(now),)))}"
