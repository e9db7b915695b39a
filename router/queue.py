"""Admission: the bounded line of requests that wait for a place (DESIGN §4.3). Pure; `now` is in seconds.

1. *Admit.* A new request takes an entry (its permit) or is told Overloaded, with a hint computed from how fast the line
   drains. The line is bounded by requests and by prompt tokens, and with several tenants none may fill it alone. One
   that could not leave the line before its deadline, or have its first token within `slo_ttft_s`, is told so at once.
2. *Order.* Returning requests (pre-empted, failed over) before new ones; then tenants by their shares, priorities and
   lengths (lanes.py). A request refused by a worker gets its old place again.
3. *Scan.* Only the first entries are tried per round, so a long line costs no more than a short one. Where as many as
   may are computing again what a dead worker knew, others that return wait, and new requests are tried meanwhile.
4. *Overtaking.* An entry for which there is no room may be overtaken for OVERTAKE_S; then it is `overdue`, and the
   dispatcher keeps the worker nearest to having room free for it, for HOLD_S at a time: it neither starves nor blocks.
5. *Leave.* `take` (placed) or `drop` (ended) frees the entry. The gauge is the length of the line, never a counter.
   Who was let in is served, be it later than was promised: a refusal comes at once or never.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from cluster.core.errors import IntegrityError, Overloaded
from router.drain import Answers, Estimate, Pace
from router.fairness import length_class, work_of
from router.lanes import Entry, Lanes
from router.requests import Request

SCAN = 16
OVERTAKE_S = 2.0
HOLD_S = 30.0
SHARE = 4.0
"""A tenant may hold SHARE x weight times what is still free: alone 4/5 of the line, two 4/9 each, never all of it.

Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998): nobody is pushed out,
and there is always some room for who has nothing in line yet.
"""
MARGIN = 0.5
"""Who would have to wait for more than this part of what the SLO leaves is refused: an estimate is a mean, so without a
margin half of those who just get in would begin too late (benchmarks/overload_modelled.py)."""
_RETRY_UNKNOWN_S = 5.0
_RETRY_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class LineBounds:
    """How much may wait. `weights`: of the tenants there are; of one or none, one may fill the line."""

    requests: int
    tokens: int = 1_000_000
    slo_ttft_s: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


class AdmissionQueue:
    """The waiting line. Beyond its bounds it holds only requests that come back."""

    def __init__(self, bounds: LineBounds) -> None:
        self.answers = Answers()
        self._pace = Pace()
        self._bounds = bounds
        self._lanes = Lanes(bounds.weights)
        self._by_id: dict[str, Entry] = {}
        self._tokens = 0
        self._work = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._tokens

    def ids(self) -> list[str]:
        """The waiting requests, in order."""
        return [entry.request_id for entry in self._lanes.in_order()]

    def check_room(self, tenant: str, now: float, prompt_tokens: int = 0) -> None:
        """Raises Overloaded when one more request of this tenant would be too many."""
        waiting, bounds = len(self._by_id), self._bounds
        if waiting >= bounds.requests or (self._tokens and self._tokens + prompt_tokens > bounds.tokens):
            raise Overloaded(f"{waiting} requests are waiting", retry_after_s=self.retry_after_s(now))
        if len(bounds.weights) < 2:
            return
        lane, most = self._lanes.of(tenant), SHARE * self._lanes.weight(tenant)
        too_many = lane.requests >= most * (bounds.requests - waiting)
        if lane.requests and (too_many or lane.tokens + prompt_tokens > most * (bounds.tokens - self._tokens)):
            message = f"{lane.requests} of your requests are waiting, as many as may while others do"
            raise Overloaded(message, retry_after_s=self.retry_after_s(now))

    def admit(self, request: Request, now: float) -> Entry:
        """Take a place for a new request. Raises Overloaded when there is none in time."""
        prompt = len(request.prompt)
        self.check_room(request.tenant, now, prompt)
        work = work_of(prompt, request.n * self.answers.answer_tokens(request.max_tokens))
        self._check_time(request, work, now)
        self._arrivals += 1
        entry = Entry(
            request.request_id,
            self._arrivals,
            since=now,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=prompt,
            length=length_class(prompt),
            work=work,
        )
        self._insert(entry, now)
        self._lanes.arrive(entry, now)
        return entry

    def hopeless(self, request: Request, now: float) -> Overloaded | None:
        """For a new request for which there was no room though it went before all others, or a worker was thought to
        have some: what to say when room will come too late."""
        if request.request_id not in self._by_id:
            return None
        return self._too_late(request, 0.0, now)  # its own work is in line

    def put_back(self, entry: Entry, now: float, *, returning: bool, not_before: float) -> None:
        """A place again for an admitted request: in front of new work when `returning`, else where it was."""
        self._insert(entry, now)
        if not returning and entry.departures is not None:
            self._pace.came_back(entry.departures[0])
            self._lanes.of(entry.tenant).paces[entry.length].came_back(entry.departures[1])
        entry.since = now
        entry.returning = returning
        entry.not_before = not_before
        self._lanes.put_back(entry, now)

    def scan(self, returning: int = SCAN) -> list[Entry]:
        """The entries to try now, in order: of those that return no more than so many, then new ones."""
        if len(self._by_id) == 1:  # nearly always, while there is room
            return [entry for entry in self._by_id.values() if returning > 0 or not entry.returning]
        return list(islice(self._lanes.in_order(returning), SCAN))

    @property
    def returning(self) -> int:
        """How many of those that wait return."""
        return len(self._lanes.returning)

    def take(self, request_id: str, now: float) -> None:
        """The request has been placed: its tenant is charged for it."""
        entry = self._by_id[request_id]
        self._lanes.serve(entry)
        entry.departures = None
        if now > entry.since:
            own = self._lanes.of(entry.tenant).paces[entry.length]
            entry.departures = self._pace.departed(entry.work, now), own.departed(entry.work, now)
        self._remove(entry, now)

    def drop(self, request_id: str, now: float) -> None:
        """The request has ended, if it was waiting at all."""
        if (entry := self._by_id.get(request_id)) is not None:
            self._remove(entry, now)

    def written(self, entry: Entry, output_tokens: int) -> None:
        """A placed request has so many tokens by now: more than was expected counts at once."""
        if (work := work_of(entry.prompt_tokens, output_tokens)) > entry.charged:
            self._lanes.charge(entry, work)

    def settle(self, entry: Entry, output_tokens: int) -> None:
        """A request that does not wait has ended: what it came to is what counts."""
        if entry.charged:
            self._lanes.charge(entry, work_of(entry.prompt_tokens, output_tokens))

    def overdue(self, entry: Entry, now: float) -> bool:
        """Note that there is no room for `entry`; whether it has been overtaken for long enough."""
        if entry.blocked_since is None or now - entry.blocked_since >= OVERTAKE_S + HOLD_S:
            entry.blocked_since = now
        return now - entry.blocked_since >= OVERTAKE_S

    def stood_still(self, seconds: float, now: float) -> None:
        """For so long until now there was no worker at all: nothing is learnt from that about the time after it."""
        self._pace.stood_still(seconds, now)
        self._lanes.stood_still(seconds, now)

    def expected_wait_s(self, now: float) -> float | None:
        """How long the whole line takes to drain; None while the pace is unknown."""
        if not self._by_id:
            return 0.0
        return self._pace.wait_s(self._work, self._typical, now)

    def retry_after_s(self, now: float) -> float:
        """A hint for who is turned away: about when half of those who wait now will be gone, 1 s to 60 s."""
        wait_s = self.expected_wait_s(now)
        return _RETRY_UNKNOWN_S if wait_s is None else _hint(wait_s / 2)

    def check_integrity(self) -> None:
        """Raises IntegrityError when line and index disagree or the order is broken."""
        line = list(self._lanes.in_order())
        if len(line) != len(self._by_id) or any(self._by_id.get(e.request_id) is not e for e in line):
            raise IntegrityError("admission queue: line and index disagree")
        if self._tokens != sum(entry.prompt_tokens for entry in line):
            raise IntegrityError("admission queue: the sum of prompt tokens is wrong")
        self._lanes.check_integrity()

    def _check_time(self, request: Request, work: float, now: float) -> None:
        """Raises Overloaded when it would wait for too long. Where nobody waits there may be room: see `hopeless`."""
        if self._by_id and (refusal := self._too_late(request, work, now)) is not None:
            raise refusal

    def _wait_s(self, estimate: Estimate, request: Request, work: float, now: float) -> float | None:
        """How long so much more work would wait: behind what is served before it, and behind others of its class."""
        where = request.priority, length_class(len(request.prompt))
        ahead = min(self._work + work, self._lanes.ahead(request.tenant, *where, work))
        waits = (
            estimate(self._pace, ahead, self._typical, now),
            self._lanes.of(request.tenant).wait_s(estimate, *where, work, now),
        )
        return max((wait for wait in waits if wait is not None), default=None)

    def _too_late(self, request: Request, work: float, now: float) -> Overloaded | None:
        """What to say when `work` more in line would wait for too long.

        An SLO is a promise to all: who might miss it is turned away. A deadline is one client's own: who must miss it.
        """
        slo, deadline = self._bounds.slo_ttft_s, request.deadline_s
        longest, shortest = (self._wait_s(e, request, work, now) for e in (Pace.longest_s, Pace.shortest_s))
        if shortest is not None and shortest > deadline:
            message = f"a place would come in about {shortest:.0f} s, after the deadline of {deadline:.0f} s"
            return Overloaded(message, retry_after_s=_hint(shortest - deadline))
        if slo is None or longest is None:
            return None
        patience = min(deadline, MARGIN * self._left_s(request, slo))
        if longest <= patience:
            return None
        message = (
            f"the first token would come in about {longest + self._first_s(request):.1f} s; {slo:g} s are promised here"
        )
        return Overloaded(message, retry_after_s=_hint(longest - patience))

    def _left_s(self, request: Request, slo_s: float) -> float:
        """What of the SLO is left for waiting."""
        return max(0.0, slo_s - self._first_s(request))

    def _first_s(self, request: Request) -> float:
        return self.answers.first_token_s(len(request.prompt))

    @property
    def _typical(self) -> float:
        """Work of a request that waits."""
        return self._work / max(1, len(self._by_id))

    def _insert(self, entry: Entry, now: float) -> None:
        if entry.request_id in self._by_id:
            raise IntegrityError(f"request {entry.request_id} waits twice")
        if not self._by_id:
            self._pace.began(now)
        self._by_id[entry.request_id] = entry
        self._tokens += entry.prompt_tokens
        self._work += entry.work

    def _remove(self, entry: Entry, now: float) -> None:
        del self._by_id[entry.request_id]
        self._tokens -= entry.prompt_tokens
        self._work = self._work - entry.work if self._by_id else 0.0  # no rounding is carried along
        self._lanes.remove(entry, now)
        if not self._by_id:
            self._pace.ended(now)


def _hint(seconds: float) -> float:
    return min(_RETRY_MAX_S, max(1.0, seconds))
