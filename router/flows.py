"""Which prefill worker's KV goes to which decode worker: what moved in the last minute. And the newest failovers.

Pure; `now` is the router's monotonic seconds.
"""

from collections import deque
from dataclasses import dataclass, field

from router.records import AttemptRecord, RequestRecord
from router.windows import RollingSums

SLOT_S, SLOTS = 5.0, 12
_MOST_PAIRS = 4096
_MOST_FAILOVERS = 64
_FAILOVER = ("lost", "failed", "handed over", "preempted", "unknown")

Pair = tuple[str, str]  # names: prefill, decode


@dataclass(slots=True)
class Moved:
    """Hand-offs between one pair: how many, bytes, milliseconds that decode had to wait for them."""

    last: float = 0.0
    sums: RollingSums = field(default_factory=lambda: RollingSums(3, SLOT_S, SLOTS))


@dataclass(frozen=True, slots=True)
class Failover:
    """An attempt that ended before its request. `attempt` is its place in the record."""

    at: float
    record: RequestRecord
    attempt: int

    @property
    def failed(self) -> AttemptRecord:
        return self.record.attempts[self.attempt]

    @property
    def successor(self) -> AttemptRecord | None:
        """Who went on with it; None: nobody has yet, or the request ended."""
        later = self.record.attempts[self.attempt + 1 :]
        return later[0] if later else None


class Flows:
    """What moved lately, by pair; and the newest failovers, of no more requests than are `remembered`."""

    def __init__(self, remembered: int) -> None:
        self._moved: dict[Pair, Moved] = {}
        self.failovers: deque[Failover] = deque(maxlen=min(remembered, _MOST_FAILOVERS))

    def handed_off(self, pair: Pair, kv_bytes: int, exposed_ms: float, now: float) -> None:
        """A hand-off has ended well."""
        moved = self._moved.get(pair)
        if moved is None:
            self._forget(now)
            if len(self._moved) >= _MOST_PAIRS:
                return
            moved = self._moved[pair] = Moved()
        moved.last = now
        moved.sums.add(now, 1, kv_bytes, exposed_ms)

    def attempt_ended(self, record: RequestRecord, outcome: str, now: float) -> None:
        """The newest attempt of a request ended and the request did not. Refusals are no failovers."""
        if outcome.startswith(_FAILOVER):
            self.failovers.append(Failover(now, record, len(record.attempts) - 1))

    def moved(self, now: float) -> dict[Pair, tuple[int, int, float]]:
        """By pair, over the last minute: hand-offs, bytes, and milliseconds exposed, all added up."""
        self._forget(now)
        found = {}
        for pair, moved in self._moved.items():
            count, kv_bytes, exposed = moved.sums.totals(now)
            found[pair] = (int(count), int(kv_bytes), exposed)
        return found

    def _forget(self, now: float) -> None:
        for pair in [pair for pair, moved in self._moved.items() if now - moved.last > SLOT_S * SLOTS]:
            del self._moved[pair]
