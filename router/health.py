"""Why a worker gets less work for a while: it failed, or it refused. Pure; `now` is in seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class Health:
    """Memory of failures and refusals. A client's error never gets here (I11)."""

    failures: int = 0
    cooling_until: float = 0.0
    refusals: int = 0
    refused_until: float = 0.0
    refused_blocks: int = 0

    def failed(self, now: float) -> None:
        self.failures += 1
        self.cooling_until = now + min(30.0, 0.5 * 2.0 ** (self.failures - 1))

    def succeeded(self) -> None:
        self.failures = 0

    def refused(self, blocks: int, retry_after_s: float, now: float) -> None:
        """No room for `blocks`: nothing as large is sent again before the hint, doubled each time in a row, is over."""
        self.refusals += 1
        self.refused_blocks = min(blocks, self.refused_blocks) if now < self.refused_until else blocks
        wait = max(retry_after_s, 0.05 * 2.0 ** min(self.refusals - 1, 5))
        self.refused_until = now + min(2.0, wait)

    def paused(self, retry_after_s: float, now: float) -> None:
        """A prefill worker would take nothing: it is left alone until its hint is over."""
        self.refused_until = now + min(2.0, max(0.05, retry_after_s))

    def accepted(self) -> None:
        self.refusals = 0
