"""Workers by name over all their lives, for people: who is there, who was, how often it came back. Pure.

A worker that is started again has another epoch, and often another address: to the dispatcher it is somebody else. To
who looks after the cluster it is decode-0 again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

LEFT_S = 120.0  # one that left in order is told of for so long: its successor may have a model to load
LOST_S = 900.0  # and one that vanished: its supervisor may still be trying
_MOST = 4096  # names


@dataclass(slots=True)
class Life:
    """What is known of one name. Times are the router's monotonic seconds.

    `lives`: different epochs met. `away_s`: how long it had been silent before the present life was met.
    """

    name: str
    role: str
    epoch: int
    lives: int
    met: float
    heard: float
    leaving: bool = False
    away_s: float | None = None


class Lives:
    """Everybody who was ever met, as long as it is of interest."""

    def __init__(self) -> None:
        self._by_name: dict[str, Life] = {}

    def heard(self, name: str, role: str, epoch: int, now: float, *, leaving: bool) -> None:
        """It said something of itself."""
        known = self._by_name.get(name)
        if known is None:
            if len(self._by_name) < _MOST:
                self._by_name[name] = Life(name, role, epoch, 1, now, now, leaving)
            return
        if known.epoch != epoch:
            known.away_s, known.lives, known.met = now - known.heard, known.lives + 1, now
            known.epoch, known.role = epoch, role
        known.heard, known.leaving = now, leaving

    def get(self, name: str) -> Life | None:
        return self._by_name.get(name)

    def gone(self, present: Iterable[str], now: float) -> list[Life]:
        """Those that are not among `present` any more. Who has been away for too long is forgotten."""
        there = set(present)
        away = [life for name, life in self._by_name.items() if name not in there]
        for life in away:
            if now - life.heard > (LEFT_S if life.leaving else LOST_S):
                del self._by_name[life.name]
        return [life for life in away if life.name in self._by_name]
