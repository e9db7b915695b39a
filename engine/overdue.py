"""How long steps take, learnt from the steps themselves: for etas, for routers, and to notice a stuck engine (I9)."""

GRACE_S = 10.0
FACTOR = 20.0
WEIGHT = 0.2  # of the newest step in the moving averages
DEFAULT_TOKENS_PER_S = 200.0  # before anything was measured: pessimistic, so that nobody is declared late too early
READING = 16  # a step with at least so many positions counts as reading, otherwise as decoding


class OverdueWatch:
    """Moving averages of step durations."""

    def __init__(self) -> None:
        self.reading_rate = 0.0  # positions per second in steps that read prompts; 0 before the first
        self.decode_step_s = 0.0  # seconds of a step that only decodes; 0 before the first

    def done(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` positions took `seconds`."""
        if tokens >= READING:
            rate = tokens / max(seconds, 1e-9)
            self.reading_rate = rate if not self.reading_rate else (1 - WEIGHT) * self.reading_rate + WEIGHT * rate
        else:
            old = self.decode_step_s
            self.decode_step_s = seconds if not old else (1 - WEIGHT) * old + WEIGHT * seconds

    def predict(self, tokens: int) -> float:
        """Expected seconds for `tokens` positions."""
        return tokens / (self.reading_rate or DEFAULT_TOKENS_PER_S)

    def overdue(self, tokens: int, waited: float) -> bool:
        """Whether a plan of `tokens` positions that left `waited` seconds ago should be given up for lost."""
        return waited > max(GRACE_S, FACTOR * self.predict(tokens))
