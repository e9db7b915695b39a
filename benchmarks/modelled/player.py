"""Plays requests on a modelled cluster and tells what became of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.modelled.cluster import ModelledCluster, ModelledRouter, Shape
from benchmarks.modelled.traces import Ask, keys_of
from cluster.core.config import RouterSettings
from cluster.core.errors import HeadraceError, Overloaded
from cluster.core.keys import BlockKey
from router.effects import Deliver, Finished
from router.requests import Request, Trace

MAX_TOKENS = 2048  # what clients allow; how much is written is the trace's secret until it happens
DEADLINE_S = 36_000.0
SETTLE_S = 2.0


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds from its arrival; None: that never came."""

    ask: Ask
    trace: Trace
    arrived: float
    ttft: float | None = None
    ended: float | None = None
    error: HeadraceError | None = None

    @property
    def good(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.ended is None or self.ttft is None or self.ask.output_tokens < 2:
            return None
        return (self.ended - self.ttft) / (self.ask.output_tokens - 1)


class Player:
    """One run. Requests go to the routers in turn."""

    def __init__(
        self, asks: Sequence[Ask], shape: Shape, settings: RouterSettings, seed: int = 0, deadline_s: float = DEADLINE_S
    ) -> None:
        self.cluster = ModelledCluster(shape, settings, self._lookup, seed)
        self.outcomes = [Outcome(ask, Trace(), 0.0) for ask in asks]
        self._keys: dict[str, list[BlockKey]] = {}
        self._deadline_s = deadline_s
        self._open = 0
        for router in self.cluster.routers:
            router.deliver, router.finished = self._deliver, self._finished

    def play(self) -> list[Outcome]:
        """All requests from first to last. Raises AssertionError when the cluster holds anything afterwards."""
        loop, routers = self.cluster.loop, self.cluster.routers
        begin = loop.now + SETTLE_S
        for number, outcome in enumerate(self.outcomes):
            router = routers[number % len(routers)]
            loop.at(begin + outcome.ask.at, partial(self._ask, number, router))
        self._open = len(self.outcomes)
        while self._open:
            loop.step()
        until = loop.now + SETTLE_S
        while loop.now < until:
            loop.step()
        self.cluster.check()
        return self.outcomes

    def _ask(self, number: int, router: ModelledRouter) -> None:
        outcome = self.outcomes[number]
        outcome.arrived = self.cluster.loop.now
        prompt = outcome.ask.prompt()
        name = str(number)
        self._keys[name] = keys_of(prompt)
        request = Request(name, name, prompt, MAX_TOKENS, deadline_s=self._deadline_s)
        try:
            router.ask(request, outcome.trace)
        except Overloaded as error:
            self._over(name, error)

    def _deliver(self, effect: Deliver) -> None:
        outcome = self.outcomes[int(effect.request_id)]
        if outcome.ttft is None and effect.event.ids:
            outcome.ttft = self.cluster.loop.now - outcome.arrived

    def _finished(self, effect: Finished) -> None:
        self._over(effect.request_id, effect.error)

    def _over(self, name: str, error: HeadraceError | None) -> None:
        outcome = self.outcomes[int(name)]
        outcome.ended, outcome.error = self.cluster.loop.now - outcome.arrived, error
        self._open -= 1
        del self._keys[name]

    def _lookup(self, attempt: str) -> tuple[list[BlockKey], int]:
        """What a decode worker knows of an attempt: its keys, which it would derive itself, and what it will write."""
        name = attempt.rpartition(".")[0]
        return self._keys.get(name, []), self.outcomes[int(name)].ask.output_tokens
