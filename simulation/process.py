"""A simulated process: all that happens to it passes through here, so it can be frozen or killed at any event.

up --freeze--> frozen --thaw--> up          a frozen process finds everything that came meanwhile when it wakes
up, frozen --kill--> dead                   for good; a restart is another process
"""

from enum import Enum, auto

from simulation.loop import Call, Loop


class Condition(Enum):
    UP = auto()
    FROZEN = auto()
    DEAD = auto()


class Process:
    """One process on one host. `host` names what a partition separates; server and engine of a worker share it."""

    def __init__(self, loop: Loop, host: str, name: str) -> None:
        self.loop = loop
        self.host = host
        self.name = name
        self.condition = Condition.UP
        self.silent = False  # its host went with it: nobody is told that it died
        self.episode = 0  # counts freezes and thaws
        self.frozen_s = 0.0  # spent frozen, in all
        self._frozen_at = 0.0
        self._arrived: list[Call] = []
        self._due: list[Call] = []

    @property
    def up(self) -> bool:
        return self.condition is Condition.UP

    @property
    def dead(self) -> bool:
        return self.condition is Condition.DEAD

    def arrive(self, call: Call) -> None:
        """Input has come: act on it now, or on waking."""
        if self.condition is Condition.UP:
            call()
        elif self.condition is Condition.FROZEN:
            self._arrived.append(call)

    def timer(self, seconds: float, call: Call) -> None:
        """Act after some time of the machine, or on waking."""
        self.loop.after(seconds, lambda: self._expire(call))

    def freeze(self) -> None:
        if self.condition is Condition.UP:
            self.condition = Condition.FROZEN
            self.episode += 1
            self._frozen_at = self.loop.now

    def thaw(self) -> None:
        """Wake. Timers and input both wait; which of them an event loop looks at first is chance."""
        if self.condition is not Condition.FROZEN:
            return
        self.condition = Condition.UP
        self.episode += 1
        self.frozen_s += self.loop.now - self._frozen_at
        arrived, due = self._arrived, self._due
        self._arrived, self._due = [], []
        for call in arrived + due if self.loop.chance(0.5) else due + arrived:
            self.arrive(call)  # it may be frozen or killed again by then

    def kill(self) -> None:
        self.condition = Condition.DEAD
        self._arrived.clear()
        self._due.clear()

    def _expire(self, call: Call) -> None:
        if self.condition is Condition.UP:
            call()
        elif self.condition is Condition.FROZEN:
            self._due.append(call)
