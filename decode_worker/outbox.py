"""Outboxes: token runs waiting for their router, at most one message per router per emit interval (DESIGN §4.10)."""

from cluster.stubs.common_pb2 import TokenLogprob, TopToken
from cluster.stubs.session_pb2 import FromDecode, TokenRun, Tokens
from engine.messages import Sampled


def logprob_message(sampled: Sampled) -> TokenLogprob | None:
    """The wire form of a drawn token's log-probabilities, or None when none were asked for."""
    if sampled.logprob is None:
        return None
    return TokenLogprob(logprob=sampled.logprob, top=[TopToken(id=i, logprob=p) for i, p in sampled.top])


class Outbox:
    """Undelivered runs of one router's session."""

    def __init__(self, emit_interval_s: float) -> None:
        self._interval = emit_interval_s
        self._runs: dict[tuple[str, int], TokenRun] = {}
        self._last = float("-inf")
        self._urgent = False

    def add(self, run: TokenRun) -> None:
        """The next tokens of a sample. First tokens and ends leave at once."""
        self._urgent = self._urgent or run.offset == 0 or bool(run.end)
        waiting = self._runs.setdefault((run.attempt, run.index), run)
        if waiting is not run:
            waiting.ids.extend(run.ids)
            waiting.logprobs.extend(run.logprobs)
            waiting.end = run.end

    def due(self, now: float) -> float | None:
        """When `flush` would give something, or None when nothing waits."""
        if not self._runs:
            return None
        return now if self._urgent else self._last + self._interval

    def flush(self, now: float, *, force: bool = False) -> FromDecode | None:
        """The message to send now, if its time has come."""
        due = self.due(now)
        if due is None or (due > now and not force):
            return None
        runs, self._runs = list(self._runs.values()), {}
        self._last, self._urgent = now, False
        return FromDecode(tokens=Tokens(runs=runs))
