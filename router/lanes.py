"""The order of the waiting line: returning requests first, then tenants by their shares (DESIGN §4.3). Pure.

1. *Returning* requests (pre-empted, failed over) go before new ones, older before younger.
2. *Between tenants* the one with the lowest counter goes next (fairness.py): each gets work by its weight.
3. *Within a tenant* a lower `priority` goes first. Among equal ones each class of prompt length has a line and a
   counter of its own, so that short prompts do not wait behind a heap of long ones, nor long ones for ever; within a
   class the older goes first.

A priority orders the requests of one tenant only: who asks for -1000 all the time gets no larger share by it.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from cluster.core.errors import IntegrityError
from router.drain import Departure, Estimate, Pace
from router.fairness import Counters


@dataclass(slots=True, eq=False)
class Entry:
    """A request's place in the line, the same one whenever it returns. `charged`: work that its tenant was charged."""

    request_id: str
    arrival: int
    since: float = 0.0
    tenant: str = ""
    priority: int = 0
    prompt_tokens: int = 0
    length: int = 0
    work: float = 0.0
    returning: bool = False
    charged: float = 0.0
    not_before: float = 0.0
    blocked_since: float | None = None
    departures: tuple[Departure, Departure] | None = None  # from the whole line, and from that of its class

    @property
    def order(self) -> tuple[int, int]:
        """Within a class of length."""
        return self.priority, self.arrival


class Lane:
    """What waits of one tenant: a sorted line for each class of length, and how fast each drains."""

    def __init__(self) -> None:
        self.lines: dict[int, list[Entry]] = defaultdict(list)
        self.paces: dict[int, Pace] = defaultdict(Pace)
        self.counters: Counters[int] = Counters()
        self.requests = 0
        self.tokens = 0
        self.work = 0.0

    def waiting(self) -> list[int]:
        """The classes of length of which something waits."""
        return [length for length, line in self.lines.items() if line]

    def stood_still(self, seconds: float, now: float) -> None:
        """See `Pace.stood_still`."""
        for pace in self.paces.values():
            pace.stood_still(seconds, now)

    def add(self, entry: Entry, now: float) -> None:
        if not self.lines[entry.length]:
            self.paces[entry.length].began(now)
        insort(self.lines[entry.length], entry, key=lambda e: e.order)
        self._count(entry, 1)

    def remove(self, entry: Entry, now: float) -> None:
        """Raises IntegrityError when it is not where it should be."""
        line = self.lines[entry.length]
        at = bisect_left(line, entry.order, key=lambda e: e.order)
        if at == len(line) or line[at] is not entry:
            raise IntegrityError(f"request {entry.request_id} is not where it should wait")
        del line[at]
        if not line:
            self.paces[entry.length].ended(now)
        self._count(entry, -1)

    def wait_s(self, estimate: Estimate, priority: int, length: int, work: float, now: float) -> float | None:
        """How long until this much more work of a class has left its line; None while its pace is unknown.

        This knows what `ahead` cannot: that others will come meanwhile and go before it.
        """
        parts = [entry.work for entry in self.lines[length] if entry.priority <= priority] + ([work] if work else [])
        return estimate(self.paces[length], sum(parts), sum(parts) / max(1, len(parts)), now)

    def in_order(self) -> Iterator[Entry]:
        """Its entries in the order in which they would be served."""
        counters = {length: self.counters[length] for length in self.waiting()}
        at = dict.fromkeys(counters, 0)
        while counters:
            heads = {length: self.lines[length][at[length]] for length in counters}
            length = min(heads, key=lambda c: (heads[c].priority, counters[c], heads[c].arrival))
            yield heads[length]
            counters[length] += heads[length].work
            at[length] += 1
            if at[length] == len(self.lines[length]):
                del counters[length]

    def ahead(self, priority: int, length: int, work: float) -> float:
        """Work of this tenant that would be served until a new request of `work` is, its own included."""
        better = 0.0
        same: dict[int, float] = {length: work}
        for other, line in self.lines.items():
            for entry in line:
                if entry.priority < priority:
                    better += entry.work
                elif entry.priority == priority:
                    same[other] = same.get(other, 0.0) + entry.work
        own = same.pop(length)
        return better + self.counters.ahead(length, own, same, idle=not self.lines.get(length))

    def _count(self, entry: Entry, by: int) -> None:
        self.requests += by
        self.tokens += by * entry.prompt_tokens
        self.work = self.work + by * entry.work if self.requests else 0.0  # no rounding is carried along


class Lanes:
    """Everything that waits, in order."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.returning: list[Entry] = []
        self._lanes: dict[str, Lane] = defaultdict(Lane)
        self._counters: Counters[str] = Counters(weights)

    def of(self, tenant: str) -> Lane:
        return self._lanes[tenant]

    def weight(self, tenant: str) -> float:
        return self._counters.weight(tenant)

    def stood_still(self, seconds: float, now: float) -> None:
        """See `Pace.stood_still`."""
        for lane in self._lanes.values():
            lane.stood_still(seconds, now)

    def arrive(self, entry: Entry, now: float) -> None:
        """A new request."""
        lane = self._lanes[entry.tenant]
        if not lane.requests:
            self._counters.arrive(entry.tenant, self._waiting())
        if not lane.lines[entry.length]:
            lane.counters.arrive(entry.length, lane.waiting())
        lane.add(entry, now)

    def put_back(self, entry: Entry, now: float) -> None:
        """One that was served: what it was charged without being given anything is given back."""
        if entry.returning:
            insort(self.returning, entry, key=lambda e: e.arrival)
            return
        self.charge(entry, 0.0)
        self._lanes[entry.tenant].add(entry, now)

    def remove(self, entry: Entry, now: float) -> None:
        if entry.returning:
            self.returning.remove(entry)
        else:
            self._lanes[entry.tenant].remove(entry, now)

    def serve(self, entry: Entry) -> None:
        """It is given a place: from now on its tenant is charged for it."""
        if entry.charged:
            return
        entry.charged = entry.work
        self._counters.serve(entry.tenant, entry.work)
        self._lanes[entry.tenant].counters.serve(entry.length, entry.work)

    def charge(self, entry: Entry, work: float) -> None:
        """What it has come to, in all."""
        more = work - entry.charged
        if more:
            entry.charged = work
            self._counters.charge(entry.tenant, more)
            self._lanes[entry.tenant].counters.charge(entry.length, more)

    def in_order(self, returning: int | None = None) -> Iterator[Entry]:
        """Everything that waits, in the order in which it would be served if there were room for each in turn.

        Of those that return only the first `returning`, if so many are wanted.
        """
        yield from self.returning[:returning]
        heap: list[tuple[float, int, str, Entry, Iterator[Entry]]] = []
        for tenant in self._waiting():
            entries = self._lanes[tenant].in_order()
            first = next(entries)
            heap.append((self._counters[tenant], first.arrival, tenant, first, entries))
        heapify(heap)
        while heap:
            counter, _, tenant, entry, entries = heappop(heap)
            yield entry
            if (following := next(entries, None)) is not None:
                counter += entry.work / self.weight(tenant)
                heappush(heap, (counter, following.arrival, tenant, following, entries))

    def ahead(self, tenant: str, priority: int, length: int, work: float) -> float:
        """Work that would be served before a new request of `work` had been, its own included."""
        lane = self._lanes[tenant]
        others = {other: self._lanes[other].work for other in self._waiting() if other != tenant}
        own = self._counters.ahead(tenant, lane.ahead(priority, length, work), others, idle=not lane.requests)
        return sum(entry.work for entry in self.returning) + own

    def check_integrity(self) -> None:
        """Raises IntegrityError when a line is out of order or its sums are wrong."""
        for tenant, lane in self._lanes.items():
            lines = list(lane.lines.values())
            if any(line != sorted(line, key=lambda e: e.order) for line in lines):
                raise IntegrityError(f"a line of tenant {tenant!r} is out of order")
            if lane.requests != sum(map(len, lines)) or lane.tokens != sum(e.prompt_tokens for e in chain(*lines)):
                raise IntegrityError(f"tenant {tenant!r}: what waits is counted wrongly")

    def _waiting(self) -> list[str]:
        return [tenant for tenant, lane in self._lanes.items() if lane.requests]
