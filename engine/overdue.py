"""How long steps take, learnt from the steps themselves: for etas, and to notice a stuck engine (I9)."""

from cluster.core.durations import Durations
from engine.rates import StepRates

GRACE_S = 10.0
STEPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)  # cells of steps, for routers
FACTOR = 20.0
LATE_S = 2.5  # routers hear of it within a heartbeat: about three seconds after an engine froze nothing new comes
LATE_FACTOR = 6.0
WEIGHT = 0.2  # of the newest step in the moving averages
DEFAULT_TOKENS_PER_S = 200.0  # before anything was measured: pessimistic, so that nobody is declared late too early
READING = 16  # a step with at least so many positions counts as reading, otherwise it says nothing of the pace


class OverdueWatch:
    """The pace of steps that read, and how long the engine has owed an answer."""

    def __init__(self) -> None:
        self.rates = StepRates()  # finer, for routers
        self.steps = Durations(STEPS_S)
        self._asked: float | None = None
        self.is_late = False  # at the last `check`: new work should go elsewhere
        self.reading_rate = 0.0  # positions per second in steps that read prompts; 0 before the first

    def done(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` positions took `seconds`."""
        self.steps.add(seconds)
        if tokens >= READING:
            rate = tokens / max(seconds, 1e-9)
            self.reading_rate = rate if not self.reading_rate else (1 - WEIGHT) * self.reading_rate + WEIGHT * rate

    def predict(self, tokens: int) -> float:
        """Expected seconds for `tokens` positions."""
        return tokens / (self.reading_rate or DEFAULT_TOKENS_PER_S)

    def heard(self) -> None:
        """The engine answered a digest or a copy: it is alive."""
        self._asked = None

    def silence(self, now: float, plan_sent_at: float | None, *, asked: bool) -> float:
        """Seconds that the engine has owed an answer: to the plan in flight, or to digests and copies (`asked`).

        What was asked and not answered is counted from the first call that saw it.
        """
        self._asked = (now if self._asked is None else self._asked) if asked else None
        owed = [at for at in (plan_sent_at, self._asked) if at is not None]
        return now - min(owed) if owed else 0.0

    def check(self, now: float, plan_sent_at: float | None, tokens: int, *, asked: bool) -> float | None:
        """To be called at every tick, with the positions of the plan in flight. Seconds that an engine is overdue for.

        None when it is not.
        """
        waited = self.silence(now, plan_sent_at, asked=asked)
        self.is_late = self.late(tokens, waited)
        return waited if self.overdue(tokens, waited) else None

    def slept(self, seconds: float) -> None:
        """This process itself did not run for so long."""
        if self._asked is not None:
            self._asked += seconds

    def late(self, tokens: int, waited: float) -> bool:
        """Whether new work should go elsewhere until the engine answers: far from lost, but far from what is usual."""
        return waited > max(LATE_S, LATE_FACTOR * self.predict(tokens))

    def overdue(self, tokens: int, waited: float) -> bool:
        """Whether a plan of `tokens` positions that left `waited` seconds ago should be given up for lost."""
        return waited > max(GRACE_S, FACTOR * self.predict(tokens))
