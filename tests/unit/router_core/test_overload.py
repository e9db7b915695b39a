"""More is asked than can be served: who is let in is served in time, the others are told at once (FAULTS P05, P09)."""

from dataclasses import dataclass, field

from cluster.core.errors import Overloaded
from router.requests import Request
from tests.unit.router_core.fakes import BLOCK
from tests.unit.router_core.world import Client, World, world

TICK_S = 0.1
AT_ONCE = 0.04  # ticks within which a worker's refusal comes at once (router.hearing.AT_ONCE_S)
SLO_S = 2.0


@dataclass
class Load:
    """Requests at a steady rate, on a clock of its own."""

    made: World
    tick_s: float = TICK_S
    asked: int = 0
    arrivals: dict[str, float] = field(default_factory=dict)
    firsts: dict[str, float] = field(default_factory=dict)
    refused: list[float] = field(default_factory=list)  # the hints
    told: dict[str, float] = field(default_factory=dict)  # seconds until who was let in was refused after all
    longest: int = 0
    owed: float = 0.0

    def run(self, seconds: float, per_second: float, max_tokens: int, tenant: str = "") -> None:
        for _ in range(round(seconds / self.tick_s)):
            self.owed += per_second * self.tick_s
            while self.owed >= 1:
                self.owed -= 1
                self.ask(max_tokens, tenant)
            self.step()

    def ask(self, max_tokens: int, tenant: str = "") -> None:
        self.asked += 1
        name = f"r{self.asked}"
        prompt = (max_tokens - 1 - self.asked % 3,) + (0,) * 7  # answers of all but max_tokens
        try:
            client = self.made.ask(Request(name, "x", prompt, max_tokens, tenant=tenant))
            for outcome in client.outcomes:
                if outcome is not None:
                    raise outcome
        except Overloaded as refusal:
            self.refused.append(refusal.retry_after_s)
            del self.made.clients[name]
        else:
            self.arrivals[name] = self.made.now

    def step(self) -> None:
        self.made.advance(self.tick_s)
        self.longest = max(self.longest, self.made.core.gauges()["queued"])
        for name, at in self.arrivals.items():
            client = self.made.clients[name]
            if name not in self.firsts and client.ids[0]:
                self.firsts[name] = self.made.now - at
            if name not in self.told and client.outcomes and isinstance(client.outcomes[0], Overloaded):
                self.told[name] = round(self.made.now - at, 6)

    def finish(self) -> None:
        for _ in range(2000):
            if all(client.over for client in self.made.clients.values()):
                return
            self.step()
        raise AssertionError("it never became quiet")

    def served(self) -> list[Client]:
        return [client for client in self.made.clients.values() if client.outcomes == [None]]

    def late(self) -> int:
        """How many of those who were let in began too late."""
        return sum(first > SLO_S + 2 * TICK_S for first in self.firsts.values())


def loaded(weights: dict[str, float] | None = None, tick_s: float = TICK_S, **settings: float) -> Load:
    made = world(prefill=1, decode=1, weights=weights, **settings)
    made.workers["d0:1"].blocks = 40 * (8 // BLOCK + 2)
    made.heartbeat()
    return Load(made, tick_s)


def test_longer_answers_at_the_same_rate_are_refused_early_and_not_felt_as_waiting() -> None:
    """P05: a decode pool that is full shows as 429 at the door. What was let in is served, nearly all of it in time."""
    load = loaded(tick_s=AT_ONCE, slo_ttft_s=SLO_S)
    load.run(10.0, 10, 8)
    assert not load.refused
    load.run(40.0, 5, 200)
    load.finish()
    assert len(load.refused) > 100
    assert all(1.0 <= hint <= 60.0 for hint in load.refused)
    assert load.late() <= len(load.refused) / 8, "but for those before the pace was known"
    assert set(load.told.values()) == {AT_ONCE}, "by a worker that had no room after all"
    assert len(load.served()) + len(load.told) == len(load.made.clients)
    assert load.made.idle()


def test_without_an_slo_only_the_bound_of_the_line_refuses() -> None:
    load = loaded(queue_limit=20)
    load.run(20.0, 5, 200)
    load.finish()
    assert load.longest == 20
    assert load.refused
    assert len(load.served()) == len(load.made.clients)
    assert max(load.firsts.values()) > SLO_S


def test_five_thousand_at_once_leave_nothing_behind_and_latency_recovers() -> None:
    """P09: the line holds no more than it may, the rest is told at once; ten seconds later it is as quick as before."""
    load = loaded(queue_limit=64)
    load.run(2.0, 10, 8)
    before = max(load.firsts.values())
    for _ in range(5000):
        load.ask(8)
    assert load.made.core.gauges()["queued"] <= 64
    assert len(load.refused) > 4800
    load.finish()
    assert all(client.outcomes == [None] for client in load.made.clients.values())
    assert load.made.idle()
    for _ in range(100):
        load.step()
    load.firsts.clear()
    load.arrivals.clear()
    load.run(2.0, 10, 8)
    load.finish()
    assert max(load.firsts.values()) <= before + TICK_S
    assert not load.refused[5000:]


def test_goodput_at_three_times_capacity_is_that_at_capacity() -> None:
    """Served in time per second, at once and three times what the decode pool can do."""
    goodput = {}
    for times in (1, 3):
        load = loaded(tick_s=AT_ONCE, slo_ttft_s=SLO_S)
        load.run(10.0, times * 1.75, 80)  # until the pace is known
        known = load.made.now
        load.run(80.0, times * 1.75, 80)
        load.finish()
        in_time = {name for name, took in load.firsts.items() if took <= SLO_S and load.arrivals[name] >= known}
        goodput[times] = len([c for c in load.served() if c.request.request_id in in_time])
    assert goodput[3] >= 0.9 * goodput[1]


def test_a_tenant_that_floods_takes_from_nobody() -> None:
    """One asks for many times what there is, the other for a little: that one waits for no more than one place."""
    load = loaded(queue_limit=100, weights={"flood": 1.0, "modest": 1.0})
    load.run(10.0, 30, 80, "flood")
    waits = []
    for _ in range(6):
        load.ask(80, "modest")
        name = f"r{load.asked}"
        load.run(6.0, 20, 80, "flood")
        waits.append(load.firsts[name])
    assert max(waits) <= 5.0, "until the first of those that run has ended; those who flood wait for 40 s"
    assert load.longest >= 80
    load.finish()
