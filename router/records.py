"""What became of the most recent requests, for people: which pairs were tried, why, when, and how each attempt ended.

No text and no token ids are kept. A record is filled while its request runs and stays, unchanged, until newer requests
have pushed it out. Times are milliseconds since the request was admitted.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from router.placement import Considered, Placement
from router.requests import Request, Trace


@dataclass(slots=True)
class AttemptRecord:
    """One attempt. `prefill` is the ranked list D was given; `outcome` is empty while it runs."""

    decode: str
    prefill: tuple[str, ...]
    local: bool
    considered: tuple[Considered, ...]
    placed_ms: float
    accepted_ms: float | None = None
    first_token_ms: float | None = None
    ended_ms: float | None = None
    outcome: str = ""
    kv_from: str = ""  # the prefill worker whose KV decode takes; "": none
    kv_bytes: int = 0
    exposed_ms: float | None = None  # once the hand-off is over


@dataclass(slots=True)
class RequestRecord:
    """One request. `arrived` is the router's monotonic clock; `waiting_for` is why it could not be placed last time."""

    request_id: str
    public_id: str
    prompt_tokens: int
    max_tokens: int
    samples: int
    tenant: str
    arrived: float
    trace: Trace
    attempts: list[AttemptRecord] = field(default_factory=list)
    waiting_for: str = ""
    ended_ms: float | None = None
    outcome: str = ""
    written: int = 0  # tokens of all samples, once it has ended

    def since(self, now: float) -> float:
        """Milliseconds from admission to `now`."""
        return (now - self.arrived) * 1000

    def placed(self, placement: Placement, now: float) -> AttemptRecord:
        """A new attempt begins."""
        names = tuple(p.name for p in placement.prefill)
        attempt = AttemptRecord(placement.decode.name, names, placement.local, placement.considered, self.since(now))
        self.attempts.append(attempt)
        self.waiting_for = ""
        return attempt

    def attempt_ended(self, attempt: AttemptRecord, outcome: str, now: float) -> None:
        attempt.outcome, attempt.ended_ms = outcome, self.since(now)

    def ended(self, outcome: str, now: float) -> None:
        self.outcome, self.ended_ms = outcome, self.since(now)


def record_of(request: Request, trace: Trace, now: float) -> RequestRecord:
    """The record of a request that was just admitted."""
    return RequestRecord(
        request_id=request.request_id,
        public_id=request.public_id,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        samples=request.n,
        tenant=request.tenant,
        arrived=now,
        trace=trace,
    )


class Recorder(Protocol):
    """Who knows of recent requests."""

    def records(self, name: str) -> list[RequestRecord]:
        """Those that are called so, by our id or by the client's; the newest first. One that runs is always known by
        ours."""


class Records:
    """The newest `limit` records."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[str, RequestRecord] = {}  # oldest first
        self._by_public_id: dict[str, deque[RequestRecord]] = {}  # clients may use one id for many requests

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: RequestRecord) -> None:
        """Keep it; the oldest goes when there are too many."""
        if self._limit == 0:
            return
        if len(self._by_id) >= self._limit:
            self._drop(self._by_id[next(iter(self._by_id))])
        self._by_id[record.request_id] = record
        self._by_public_id.setdefault(record.public_id, deque()).append(record)

    def find(self, name: str) -> list[RequestRecord]:
        """Those that are called so, by our id or by the client's; the newest first."""
        own = self._by_id.get(name)
        return [own] if own is not None else list(reversed(self._by_public_id.get(name, ())))

    def newest(self, most: int) -> list[RequestRecord]:
        """At most so many, the newest first."""
        return list(islice(reversed(self._by_id.values()), most))

    def _drop(self, oldest: RequestRecord) -> None:
        del self._by_id[oldest.request_id]
        same = self._by_public_id[oldest.public_id]
        same.popleft()
        if not same:
            del self._by_public_id[oldest.public_id]
