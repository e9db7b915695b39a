"""What the dispatcher knows, at one moment, for people to look at. No text, no token ids. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.books import Books
from router.flows import Failover, Pair
from router.lives import Life
from router.records import RequestRecord
from router.workers import WorkerView

RECENT = 40  # requests


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One worker. `free_blocks`, `running` and so on are what it said last, up to half a second ago."""

    name: str
    address: str
    role: str
    epoch: int
    state: str
    lives: int
    met: float
    away_s: float | None
    blocks: int
    free_blocks: int
    running: int
    waiting: int
    handing_off: int
    queued_tokens: int
    attempts: int
    slots_set_aside: int


@dataclass(frozen=True, slots=True)
class FlowNow:
    """One pair. `under_way`: hand-offs that have begun and not ended. The rest is the last minute's sum."""

    pair: Pair
    under_way: int
    tokens_under_way: int
    handoffs: int
    kv_bytes: int
    exposed_ms: float


@dataclass(frozen=True, slots=True)
class Overview:
    """`now` is the router's monotonic clock. Lists are sorted by name, requests and failovers newest first."""

    now: float
    workers: Sequence[WorkerNow]
    gone: Sequence[Life]
    flows: Sequence[FlowNow]
    failovers: Sequence[Failover]
    requests: Sequence[RequestRecord]
    waiting: int
    waiting_tokens: int
    running: int


class Overseer(Protocol):
    """Who has the overview."""

    def overview(self) -> Overview:
        """As it is now."""


def overview(books: Books, now: float) -> Overview:
    """Everything at one moment."""
    by_name: dict[str, WorkerNow] = {}
    for view in books.workers.by_address.values():
        worker = _worker(books, view, now)
        if worker.name not in by_name or worker.state != "away":  # its next life may be here before the last one is out
            by_name[worker.name] = worker
    gauges = books.gauges()
    return Overview(
        now=now,
        workers=sorted(by_name.values(), key=lambda worker: natural(worker.name)),
        gone=sorted(books.workers.lives.gone(by_name, now), key=lambda life: natural(life.name)),
        flows=_flows(books, now),
        failovers=list(reversed(books.flows.failovers)),
        requests=books.records.newest(RECENT),
        waiting=gauges["queued"],
        waiting_tokens=gauges["queued_tokens"],
        running=gauges["attempts"],
    )


def natural(name: str) -> tuple[str, int, str]:
    """Sorts decode-2 before decode-10."""
    head, _, number = name.rpartition("-")
    return (head, int(number), "") if number.isdecimal() and len(number) < 10 else (name, -1, "")


def _worker(books: Books, view: WorkerView, now: float) -> WorkerNow:
    life, status, known = books.workers.lives.get(view.name), view.status, view.facts.name != ""
    return WorkerNow(
        name=view.name,
        address=view.address,
        role=view.role,
        epoch=view.epoch,
        # Known and not reachable is something else than not yet met.
        state="away" if known and not view.watch.open else view.state(now, books.workers.suspect_s),
        lives=1 if life is None else life.lives,
        met=now if life is None else life.met,
        away_s=None if life is None else life.away_s,
        blocks=view.facts.num_blocks,
        free_blocks=view.free_blocks,
        running=0 if status is None else status.running,
        waiting=0 if status is None else status.waiting,
        handing_off=0 if status is None else status.handing_off,
        queued_tokens=0 if status is None else status.queued_tokens,
        attempts=len(view.bookings),
        slots_set_aside=0 if status is None else status.gauges.get("slots_set_aside", 0),
    )


def _flows(books: Books, now: float) -> list[FlowNow]:
    under_way: Counter[Pair] = Counter()
    tokens: Counter[Pair] = Counter()
    for follow in books.attempts.values():
        attempt = follow.attempt
        if attempt is not None and attempt.record.kv_from and not attempt.handed_off:
            pair = (attempt.record.kv_from, attempt.record.decode)
            under_way[pair] += 1
            tokens[pair] += attempt.tokens
    moved = books.flows.moved(now)
    pairs = sorted({*under_way, *moved}, key=lambda pair: (natural(pair[0]), natural(pair[1])))
    return [FlowNow(pair, under_way[pair], tokens[pair], *moved.get(pair, (0, 0, 0.0))) for pair in pairs]
