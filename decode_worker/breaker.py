"""Whether a prefill worker is worth a try: hand-offs that fail one after the other open its breaker (FAULTS F13).

    closed --`limit` in a row--> open --pause is over--> one try --it succeeds--> closed
                                  ^                         |
                                  +- it fails: twice as long -+
One per pair of workers, apart from the link: a link may be up while no read over the wire ends. Only what the other
worker does counts: neither a client's error, nor a refusal, nor a link that was lost and is dialled again. A hand-off
of which no block had to be read is no success: it says nothing of the wire.
"""

from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Times are the caller's monotonic seconds. `limit` 0: it never opens."""

    limit: int
    failures: int = 0
    until: float = 0.0  # open until then

    def allows(self, now: float) -> bool:
        """Whether a hand-off may be tried. Of those that ask after a pause, one may per pause."""
        if self._closed:
            return True
        if now < self.until:
            return False
        self.until = now + self._pause_s
        return True

    def failed(self, now: float) -> bool:
        """Count a failure. Returns whether the breaker is open by it."""
        self.failures += 1
        if self._closed:
            return False
        self.until = now + self._pause_s
        return True

    def succeeded(self) -> None:
        self.failures = 0

    @property
    def _closed(self) -> bool:
        return self.limit == 0 or self.failures < self.limit

    @property
    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures - self.limit, 10))
