"""Admission: the bounded line of requests that wait for a place (DESIGN §4.3). Pure; `now` is in seconds.

1. *Admit.* A new request takes an entry (its permit) or is told Overloaded, with a hint computed from how fast the line
   drains. One that could not leave the line before its deadline is told so at once.
2. *Order.* Returning requests (pre-empted, failed over) before new ones, older before younger. A request refused by a
   worker gets its old place again.
3. *Scan.* Only the first entries are tried per round, so a long line costs no more than a short one.
4. *Overtaking.* An entry for which there is no room may be overtaken for OVERTAKE_S; then it is `overdue`, and the
   dispatcher keeps the worker nearest to having room free for it, for HOLD_S at a time: it neither starves nor blocks.
5. *Leave.* `take` (placed) or `drop` (ended) frees the entry. The gauge is the length of the line, never a counter.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from cluster.core.errors import IntegrityError, Overloaded

SCAN = 16
OVERTAKE_S = 2.0
HOLD_S = 30.0
_RATE_WINDOW_S = 30.0
_RATE_MIN_DEPARTURES = 8
_RETRY_UNKNOWN_S = 5.0
_RETRY_MAX_S = 60.0


@dataclass(slots=True, order=True)
class Entry:
    """A request's place in the line. Ordered by (returning first, arrival)."""

    rank: int
    arrival: int
    request_id: str = field(compare=False)
    not_before: float = field(default=0.0, compare=False)
    blocked_since: float | None = field(default=None, compare=False)


class AdmissionQueue:
    """The waiting line. Holds at most `limit` requests, and beyond that only ones that come back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line: list[Entry] = []
        self._by_id: dict[str, Entry] = {}
        self._arrivals = 0
        self._busy_since = 0.0
        self._departures: deque[float] = deque(maxlen=256)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def ids(self) -> list[str]:
        """The waiting requests, in order."""
        return [entry.request_id for entry in self._line]

    def admit(self, request_id: str, now: float, deadline_s: float) -> Entry:
        """Take a place for a new request. Raises Overloaded when there is none in time."""
        wait_s = self.expected_wait_s(now)
        if len(self._line) >= self._limit:
            raise Overloaded(f"{len(self._line)} requests are waiting", retry_after_s=self.retry_after_s(now))
        if wait_s is not None and wait_s > deadline_s:
            raise Overloaded(
                f"a place would come in about {wait_s:.0f} s, after the deadline of {deadline_s:.0f} s",
                retry_after_s=self.retry_after_s(now),
            )
        self._arrivals += 1
        entry = Entry(1, self._arrivals, request_id)
        self._insert(entry, now)
        return entry

    def put_back(self, entry: Entry, now: float, *, returning: bool, not_before: float) -> None:
        """A place again for an admitted request: in front of new work when `returning`, else where it was."""
        entry.rank = 0 if returning else 1
        entry.not_before = not_before
        self._insert(entry, now)

    def scan(self) -> list[Entry]:
        """The entries to try now, in order."""
        return self._line[:SCAN]

    def take(self, request_id: str, now: float) -> None:
        """The request has been placed."""
        self._remove(request_id)
        self._departures.append(now)

    def drop(self, request_id: str) -> None:
        """The request has ended, if it was waiting at all."""
        if request_id in self._by_id:
            self._remove(request_id)

    def overdue(self, entry: Entry, now: float) -> bool:
        """Note that there is no room for `entry`; whether it has been overtaken for long enough."""
        if entry.blocked_since is None or now - entry.blocked_since >= OVERTAKE_S + HOLD_S:
            entry.blocked_since = now
        return now - entry.blocked_since >= OVERTAKE_S

    def expected_wait_s(self, now: float) -> float | None:
        """How long a new request would wait, from the present drain rate; None while that is unknown.

        Only the time in which somebody waited counts: an idle hour is not a slow queue.
        """
        if not self._line:
            return 0.0
        since = max(self._busy_since, now - _RATE_WINDOW_S)
        recent = sum(1 for at in self._departures if at >= since)
        if recent < _RATE_MIN_DEPARTURES or now <= since:
            return None
        return len(self._line) * (now - since) / recent

    def retry_after_s(self, now: float) -> float:
        """A hint for who is turned away: about when half of those who wait now will be gone, 1 s to 60 s."""
        wait_s = self.expected_wait_s(now)
        return _RETRY_UNKNOWN_S if wait_s is None else min(_RETRY_MAX_S, max(1.0, wait_s / 2))

    def check_integrity(self) -> None:
        """Raises IntegrityError when line and index disagree or the order is broken."""
        if sorted(self._line) != self._line or [self._by_id.get(e.request_id) for e in self._line] != self._line:
            raise IntegrityError("admission queue: line and index disagree")
        if len(self._by_id) != len(self._line):
            raise IntegrityError("admission queue: index holds requests that do not wait")

    def _insert(self, entry: Entry, now: float) -> None:
        if entry.request_id in self._by_id:
            raise IntegrityError(f"request {entry.request_id} waits twice")
        if not self._line:
            self._busy_since = now
        insort(self._line, entry)
        self._by_id[entry.request_id] = entry

    def _remove(self, request_id: str) -> None:
        entry = self._by_id.pop(request_id)
        at = bisect_left(self._line, entry)
        if self._line[at] is not entry:
            raise IntegrityError(f"request {request_id} is not where it should wait")
        del self._line[at]
