"""What tenants have used, by day, and the books that keep it.

1. *Count.* Every life of a router (an epoch) counts for itself, from nothing: sums by day, tenant and model.
2. *Write.* It tells the book its sums, never what was added since. The book keeps the sums of each epoch apart, and of
   two sums of one epoch the greater: told twice, late or in another order, the outcome is the same (a grow-only
   counter: Shapiro et al., Conflict-free replicated data types, 2011, §3.1.1). An answer that was lost costs nothing.
3. *Read.* A day's usage is the sum over all epochs.
4. *Fold.* OPEN_DAYS after a day has ended it is closed, by the book's own clock: nothing more is written to it, so its
   epochs can become one and the book stays small. Who comes later is told, and counts the rest as of today.

Two books under one contract suite (tests/contract/test_usage.py): one in this process, and Redis
(cluster/redis_store.py) where routers share it and what was counted outlives them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple, Protocol

from cluster.core.errors import Unavailable

DAY_S = 86_400
OPEN_DAYS = 2
KEEP_DAYS = 400

Day = int
"""Days since 1970-01-01, UTC."""

_FIRST = date(1970, 1, 1).toordinal()


class UsageUnavailable(Unavailable):
    """The shared book does not answer. What is served goes on being served and counted."""


class Sums(NamedTuple):
    """How much. Characters are Unicode code points. `input` holds `cached`, the prompt tokens that nobody computed."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    input_characters: int = 0
    output_characters: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Both."""
        a, b, c, d, e, f = self
        return Sums(a + other[0], b + other[1], c + other[2], d + other[3], e + other[4], f + other[5])

    def less(self, other: "Sums") -> "Sums":
        """What this has beyond the other; never below 0."""
        return Sums(*(max(0, mine - theirs) for mine, theirs in zip(self, other, strict=True)))

    def joined(self, other: "Sums") -> "Sums":
        """The greater of each: sums of one epoch only ever grow."""
        return Sums(*map(max, self, other))


NOTHING = Sums()


class Who(NamedTuple):
    """Whose usage, and of which model. The tenant is "" where none is configured."""

    tenant: str
    model: str


Rows = Mapping[Who, Sums]


@dataclass(frozen=True, slots=True)
class Closed:
    """A day that is not written to (any more, or yet). `today`: as the book sees it."""

    today: Day


class UsageBook(Protocol):
    """Keeps usage. Every call raises UsageUnavailable."""

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        """So much `epoch` has counted of this day until now. None: it is kept; Closed: nothing of it is."""

    async def read(self, since: Day, until: Day) -> dict[Day, dict[Who, Sums]]:
        """What all have used on each day from `since` to `until`, both included; days without usage are left out."""

    async def fold(self) -> None:
        """Let every day that is closed take the room of one epoch, and forget what is older than is kept."""

    async def close(self) -> None:
        """Let go of connections."""


class LocalUsage:
    """In this process. `today`: which day it is."""

    def __init__(self, today: Callable[[], Day], keep_days: int = KEEP_DAYS) -> None:
        self._today = today
        self._keep_days = keep_days
        self._days: dict[Day, dict[tuple[int | None, Who], Sums]] = {}

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        """See UsageBook."""
        if not is_open(day, today := self._today()):
            return Closed(today)
        kept = self._days.setdefault(day, {})
        for who, sums in rows.items():
            kept[epoch, who] = kept.get((epoch, who), NOTHING).joined(sums)
        return None

    async def read(self, since: Day, until: Day) -> dict[Day, dict[Who, Sums]]:
        """See UsageBook."""
        return {day: _added(self._days[day]) for day in sorted(self._days) if since <= day <= until}

    async def fold(self) -> None:
        """See UsageBook."""
        today = self._today()
        for day in [day for day in self._days if not is_open(day, today)]:
            kept = self._days.pop(day)
            if day >= today - self._keep_days:
                self._days[day] = {(None, who): sums for who, sums in _added(kept).items()}

    def size(self) -> int:
        """Sums that are kept."""
        return sum(map(len, self._days.values()))

    async def close(self) -> None:
        """See UsageBook."""


def is_open(day: Day, today: Day) -> bool:
    """Whether a day is still written to; tomorrow is, for clocks that are a little ahead."""
    return today - OPEN_DAYS <= day <= today + 1


def day_of(wall: float) -> Day:
    """The day (UTC) of a Unix time."""
    return int(wall // DAY_S)


def iso(day: Day) -> str:
    """As 2026-11-30."""
    return date.fromordinal(day + _FIRST).isoformat()


def day_from(text: str) -> Day:
    """The day that `iso` writes. Raises ValueError."""
    return date.fromisoformat(text).toordinal() - _FIRST


def _added(kept: Mapping[tuple[int | None, Who], Sums]) -> dict[Who, Sums]:
    total: dict[Who, Sums] = {}
    for (_, who), sums in kept.items():
        total[who] = total.get(who, NOTHING).plus(sums)
    return total
