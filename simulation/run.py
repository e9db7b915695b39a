"""One seed, from the first event to the verdict.

1. traffic     the scenario's clients, while faults strike at any message
2. recovery    no new faults; everybody comes back and is seen by everybody
3. proof       two requests through each router must succeed at once: nothing stayed broken
4. quiet       two seconds later (after the patience with a dead router) nothing is in use anywhere (I2)
"""

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.core.errors import IntegrityError
from decode_worker.core import DecodeCore
from prefill_worker.readers import HELP_S
from simulation.calls import LEAVES_PERMITS
from simulation.client import Client
from simulation.cluster import Cluster
from simulation.engine import SLOWEST_STEP_S
from simulation.faults import Faults
from simulation.limits import LONGEST_LEASE_S, SharedBook
from simulation.load import Load
from simulation.loop import START, Loop
from simulation.network import Network
from simulation.scenario import Scenario, draw_scenario
from simulation.site import Site, Violation
from simulation.wire import Wire

RECOVERY_S = 60.0
PROOF_S = 20.0
QUIET_S = 2.0
LONGEST_S = 600.0
SLOWEST_READ_S = 8.0
RANGE_ENDS = ("recomputed", "refused", "abandoned")
ODDITIES = ("jobs_invalid", "refused_for_good", "handoff_left: offered other content", "offer_out_of_order")


@dataclass(slots=True)
class Verdict:
    """What one seed showed. `violation` is empty when every invariant held."""

    seed: int
    scenario: Scenario
    violation: str = ""
    virtual_s: float = 0.0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """The verdict in one line."""
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items())) or "no fault"
        verdict = self.violation or "all invariants held"
        return f"seed {self.seed}: {verdict} ({outcomes}; {faults}; {self.virtual_s:.0f} s, {self.events} events)"


class Simulation:
    """One seeded world."""

    def __init__(self, seed: int, *, faults: bool = True, trace: Callable[[str], None] | None = None) -> None:
        self.loop = Loop(seed, trace)
        self.scenario = draw_scenario(self.loop.random, faults=faults)
        self.loop.log(f"seed {seed}: {self.scenario}")
        limits = SharedBook(self.loop) if self.scenario.shared_limits else None
        self.site = Site(self.loop, Network(self.loop, self._latency), self.scenario, limits)
        self.cluster = Cluster(self.site)
        self.load = Load(self.site, self.cluster)
        self.faults = Faults(self.site, self.cluster)
        self.verdict = Verdict(seed, self.scenario)

    def run(self) -> Verdict:
        """Play it to the end. What does not hold, and what is raised, ends in the verdict."""
        try:
            self.traffic()
            self.recovery()
            self.proof()
            self.quiet()
        except (Violation, IntegrityError) as violation:
            self.verdict.violation = str(violation)
        except Exception as error:  # the guard of this loop: an error of a core is what is looked for, not an accident
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
            self.verdict.violation = f"I8: {type(error).__name__} at {where}: {error}"
        if self.verdict.violation:
            self.loop.log(f"VIOLATION {self.verdict.violation}")
        self._sum_up()
        return self.verdict

    def traffic(self) -> None:
        self.load.begin()
        self.faults.begin()
        self._until(lambda: self.load.over, LONGEST_S, "the traffic never ends")
        self.faults.end()

    def recovery(self) -> None:
        self._until(self.cluster.settled, RECOVERY_S, "the cluster does not recover")

    def proof(self) -> None:
        self.loop.log("recovered")
        asked = [self.load.ask_to_prove(router) for router in self.cluster.routers.values() for _ in "12"]
        self._until(lambda: all(client.over for client in asked), PROOF_S, "a request after the recovery hangs")
        for client in asked:
            if client.outcome != "ok":
                raise Violation(f"I3: {client.request.request_id} fails after the recovery: {client.outcome}")

    def quiet(self) -> None:
        self._until(lambda: self.cluster.relieved_have_ended, RECOVERY_S, "a worker that was replaced never ends")
        engines = [life.engine for life in self.cluster.workers.values()]
        self._until(lambda: not any(e.computing for e in engines), SLOWEST_STEP_S + 1.0, "a step never ends")
        # What a dead router left behind is kept until it has been missed for long enough. That its streams have ended
        # was noticed everywhere by now: nobody held half of a stream when the cluster had recovered.
        missed = self.scenario.config.timing.resume_s + 0.5
        self._pass(missed if self.faults.struck["kill router"] else QUIET_S)
        self._nothing_in_use(lambda wire: wire.in_progress(silent=False))
        self._rest(max(HELP_S, SLOWEST_READ_S if self.scenario.read_slow else 0.0))
        self._nothing_in_use(lambda wire: wire.in_progress(silent=True))
        for life in self.cluster.workers.values():
            for oddity in ODDITIES:
                if life.core.status().counters.get(oddity, 0):
                    raise Violation(f"I5: {life.name} counts {oddity!r}, though nobody here lies")
            self._every_range_has_ended(life.name, life.core.status().counters)
            if isinstance(life.core, DecodeCore):
                self._every_job_has_ended(life.name, life.core)
            if life.engine.wire.serving:
                raise Violation(f"I2: the engine of {life.name} polls for readers that are not there")
        self._permits_are_back()
        for router in self.cluster.routers.values():
            router.audit()
            router.check_permits()
            used = {k: v for k, v in router.core.gauges().items() if v}
            if used:
                raise Violation(f"I2: {router.name} still holds {used}")
        self._judge(list(self.load.clients))

    def _permits_are_back(self) -> None:
        """Every tenant may again ask as much as it ever might; what a fault left behind has run out."""
        if self.site.limits is None:
            return
        limited = [share.tenant for share in self.scenario.shares]
        if any(map(self.site.limits.holds, limited)) and any(self.faults.struck[kind] for kind in LEAVES_PERMITS):
            self._pass(LONGEST_LEASE_S)
        if held := [tenant.name for tenant in limited if self.site.limits.holds(tenant)]:
            raise Violation(f"I2: the shared book still has permits of {held}")

    @staticmethod
    def _every_range_has_ended(name: str, counters: Mapping[str, int]) -> None:
        """A block that was to come over is verified, recomputed, refused or abandoned, and counted as one of these."""
        of = {
            end: counters.get(f"kv_blocks_{end}", 0)
            for end in ("wanted", "verified", "distrusted", "behind_a_gap", *RANGE_ENDS)
        }
        if of["wanted"] != of["verified"] - of["distrusted"] - of["behind_a_gap"] + sum(of[end] for end in RANGE_ENDS):
            raise Violation(f"I2: blocks of {name} that were to come over have not ended once each: {of}")

    @staticmethod
    def _every_job_has_ended(name: str, core: DecodeCore) -> None:
        """Once each, and what came over is somebody's."""
        for prefill, pair in core.state.pairs.rows.items():
            if pair.sent != pair.jobs.total():
                raise Violation(f"O07: {name} gave {prefill} {pair.sent} jobs, which ended so: {dict(pair.jobs)}")
        moved = sum(pair.kv_bytes for pair in core.state.pairs.rows.values())
        if moved != core.state.counters["kv_bytes"]:
            raise Violation(f"O07: of {core.state.counters['kv_bytes']} bytes that {name} verified pairs have {moved}")

    def _nothing_in_use(self, excused: Callable[[Wire], int]) -> None:
        """Every gauge of every worker is 0, but for slots set aside for reads that have a reason not to have ended."""
        for life in self.cluster.workers.values():
            used = {k: v for k, v in life.core.status().gauges.items() if v}
            if used.get("slots_set_aside", 0) == excused(life.engine.wire):
                used.pop("slots_set_aside", None)
            if used:
                raise Violation(f"I2: {life.name} still holds {used} after the traffic")

    def _pass(self, seconds: float) -> None:
        end = self.loop.now + seconds
        self._until(lambda: self.loop.now >= end, seconds + 1, "time stands still")

    def _rest(self, longest_s: float) -> None:
        """Until nothing is in use and nobody polls for others, or so long."""
        end, lives = self.loop.now + longest_s, self.cluster.workers.values()
        while self.loop.now < end:
            if not any(life.engine.wire.serving or any(life.core.status().gauges.values()) for life in lives):
                return
            self.loop.run_until(self.loop.now + 0.25)

    def _judge(self, clients: list[Client]) -> None:
        """Every failure must be an honest one: no room, nobody there, a deadline that was short or slept through."""
        for client in clients:
            honest = {"ok", "reset", "cancelled", "Overloaded", "Unavailable"}
            if client.request.tenant:
                honest.add("RateLimited")
            if self.faults.struck["lose limits"] and self.scenario.fail_closed:
                honest.add("QuotasUnavailable")
            if client.request.deadline_s < 10 or client.excused_s > 1.0:
                honest.add("DeadlineExceeded")
            if client.outcome not in honest:
                raise Violation(f"I3: {client.request.request_id} on {client.router} ended with {client.outcome}")

    def _until(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Run events until `done`, looked at every 0.25 s."""
        latest = self.loop.now + seconds
        while not done():
            if self.loop.now > latest:
                raise Violation(f"I3: {otherwise}")
            self.loop.run_until(self.loop.now + 0.25)

    def _latency(self) -> float:
        """Seconds of one message on one stream: mostly short, now and then very long."""
        seconds = self.loop.random.expovariate(1 / self.scenario.latency_s)
        if self.loop.chance(0.002):
            seconds += self.loop.random.uniform(0.05, 1.0)
        return seconds

    def _sum_up(self) -> None:
        verdict = self.verdict
        verdict.virtual_s = self.loop.now - START
        verdict.events = self.loop.events
        verdict.outcomes = Counter(client.outcome for client in self.load.clients)
        verdict.faults = self.faults.struck
        for client in self.load.clients:
            verdict.counters.update(client.story())
        for life in self.cluster.workers.values():
            verdict.counters.update(dict(life.core.status().counters))
        for router in self.cluster.routers.values():
            verdict.counters.update(router.core.counters())


def simulate(seed: int, *, faults: bool = True, trace: Callable[[str], None] | None = None) -> Verdict:
    """Run one seed. The same seed gives the same events, whatever machine it runs on."""
    return Simulation(seed, faults=faults, trace=trace).run()
