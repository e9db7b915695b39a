"""Workers by name over all their lives, for people: who is there, who was, how often it came back. Pure.

A worker that is started again has another epoch, and often another address: to the dispatcher it is somebody else. To
who looks after the cluster it is decode-0 again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LEFT_S = 120.0  # one that left in order is told of for so long: its successor may have a model to load
LOST_S = 900.0  # and one that vanished: its supervisor may still be trying
MOST_LIVES = 4096  # names
_MOST_FORMER = 8  # epochs of one name that may still talk beside the present one


@dataclass(slots=True)
class Life:
    """What is known of one name. Times are the router's monotonic seconds.

    `lives`: different epochs met. `away_s`: how long it had been silent before the present life was met.
    `former`: epochs of its last lives. One of these may still be on its way out, and says nothing of the present one.
    """

    name: str
    role: str
    epoch: int
    lives: int
    met: float
    heard: float
    leaving: bool = False
    away_s: float | None = None
    former: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_FORMER))


class Lives:
    """Everybody who was ever met, as long as it is of interest; of too many, those who were heard of last."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, Life] = OrderedDict()  # the last heard is last

    def heard(self, name: str, role: str, epoch: int, now: float, *, leaving: bool) -> None:
        """It said something of itself."""
        known = self._lives.get(name)
        if known is None:
            self._lives[name] = Life(name, role, epoch, 1, now, now, leaving)
            if len(self._lives) > MOST_LIVES:
                self._lives.popitem(last=False)
            return
        if epoch in known.former:
            return
        if known.epoch != epoch:
            known.former.append(known.epoch)
            known.away_s, known.lives, known.met = now - known.heard, known.lives + 1, now
            known.epoch, known.role = epoch, role
        known.heard, known.leaving = now, leaving
        self._lives.move_to_end(name)

    def get(self, name: str) -> Life | None:
        return self._lives.get(name)

    def restarts(self, name: str) -> int:
        """How often it came back as another peer."""
        life = self._lives.get(name)
        return 0 if life is None else life.lives - 1

    def forget(self, present: Iterable[str], now: float) -> None:
        """Who has been away for too long is not told of any more; those who are `present` are not away."""
        silent = []
        for life in self._lives.values():
            if now - life.heard <= LEFT_S:
                break  # and so are all that follow
            if now - life.heard > (LEFT_S if life.leaving else LOST_S):
                silent.append(life.name)
        for name in set(silent).difference(present) if silent else ():
            del self._lives[name]

    def gone(self, present: Iterable[str], now: float) -> list[Life]:
        """Those that are not among `present` any more."""
        there = set(present)
        self.forget(there, now)
        return [life for name, life in self._lives.items() if name not in there]
