"""What goes wrong, and at which message. One worker of each role and one router are left alone at any moment.

Per role there is at most one *victim*; another is chosen only when the last one is back and every router sees it ready.
So a request on a living router always has somebody who can serve it. A hunt alone takes one decode worker after the
other, for as long as the one before it is up or on its way back: patience has to last until then.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from cluster.stubs.common_pb2 import Sampling
from decode_worker.attempts import Attempt, Phase
from simulation.cluster import DECODE, PREFILL, ROUTERS, Cluster
from simulation.decode import DecodeLife
from simulation.network import Stream
from simulation.prefill import PrefillLife
from simulation.process import Process
from simulation.router_life import RouterLife
from simulation.site import Site
from simulation.worker import WorkerLife

_FREEZES_S = ((0.01, 0.9), (1.1, 5.0), (5.0, 25.0))
_PARTITIONS_S = ((0.05, 2.0), (2.0, 8.0), (8.0, 40.0))
_LOST_S = ((0.05, 1.0), (1.0, 20.0))
_HUNT_S = 10.0
_NAMES = {"prefill": PREFILL, "decode": DECODE, "router": ROUTERS}


class Faults:
    """Counts messages and strikes when the count is up."""

    def __init__(self, site: Site, cluster: Cluster) -> None:
        self.struck: Counter[str] = Counter()
        self._site = site
        self._cluster = cluster
        self._random = site.loop.random
        self._left = 0
        self._on = False
        self._victims: dict[str, str] = {}  # role -> name
        self._busy_until: dict[str, float] = {}
        self._acts: dict[str, Callable[[], bool]] = {
            "kill server": lambda: self._kill(self._worker()),
            "kill engine": lambda: self._kill_engine(self._worker()),
            "freeze server": lambda: self._freeze(self._worker(), server=True, engine=False),
            "freeze engine": lambda: self._freeze(self._worker(), server=False, engine=True),
            "freeze worker": lambda: self._freeze(self._worker(), server=True, engine=True),
            "kill router": lambda: self._kill(self._router()),
            "freeze router": self._freeze_router,
            "partition": self._partition,
            "break stream": self._break_stream,
            "break session": self._break_session,
            "drain": self._drain,
            "replace": self._replace,
            "rot": self._rot,
            "kill in a grammar": lambda: self._lie_in_wait("kill in a grammar", _has_grammar),
            "kill under penalties": lambda: self._lie_in_wait("kill under penalties", _penalises),
            "hunt": self._hunt,
            "lose limits": self._lose_limits,
        }

    def begin(self) -> None:
        """From the next message on."""
        if self._site.scenario.fault_every:
            self._on = True
            self._arm()
            self._site.network.watching = self._count

    def end(self) -> None:
        self._on = False

    def _arm(self) -> None:
        self._left = 1 + int(self._random.expovariate(1 / self._site.scenario.fault_every))

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0 and self._on:
            self._arm()
            kind = self._random.choice(self._site.scenario.faults)
            if self._acts[kind]():
                self.struck[kind] += 1

    # -- victims ----------------------------------------------------------------------------------------------------

    def _choose(self, role: str) -> str | None:
        """The victim of this role: the present one until it has recovered. None while it cannot be hurt again."""
        name = self._victims.get(role)
        if name is None or self._recovered(role, name):
            name = self._victims[role] = self._random.choice(_NAMES[role])
        return name

    def _recovered(self, role: str, name: str) -> bool:
        if self._site.loop.now < self._busy_until.get(name, 0.0):
            return False
        if role == "router":
            router = self._cluster.routers[name]
            return router.process.up and self._cluster.sees_ready(router, list(self._cluster.workers.values()))
        life = self._cluster.workers[name]
        if not life.process.up or not life.engine.process.up or life.lost:
            return False
        routers = [router for router in self._cluster.routers.values() if router.process.up]
        return all(self._cluster.sees_ready(router, [life]) for router in routers)

    def _worker(self) -> WorkerLife | None:
        name = self._choose(self._random.choice(("prefill", "decode")))
        life = self._cluster.workers[name] if name is not None else None
        return None if life is None or life.process.dead else life

    def _router(self) -> RouterLife | None:
        name = self._choose("router")
        router = self._cluster.routers[name] if name is not None else None
        return None if router is None or router.process.dead else router

    def _busy(self, name: str, seconds: float) -> None:
        until = self._site.loop.now + seconds
        self._busy_until[name] = max(until, self._busy_until.get(name, 0.0))

    # -- acts: each says whether it struck ----------------------------------------------------------------------------

    def _kill(self, victim: WorkerLife | RouterLife | None) -> bool:
        if victim is None:
            return False
        self._busy(victim.name, 0.1)
        self._soon(lambda: victim.kill(silent=self._site.loop.chance(0.2)))
        return True

    def _kill_engine(self, victim: WorkerLife | None) -> bool:
        if victim is None:
            return False
        self._busy(victim.name, 1.0)
        self._soon(victim.kill_engine if self._random.random() < 0.7 else victim.engine.fail)
        return True

    def _writing(self) -> list[tuple[DecodeLife, Attempt]]:
        """Who is in the middle of which answer."""
        lives = [self._cluster.decode(name) for name in DECODE]
        return [
            (life, attempt)
            for life in lives
            if not life.process.dead
            for attempt in life.core.state.attempts.values()
            if attempt.phase is Phase.DECODING and any(sample.emitted for sample in attempt.live)
        ]

    def _lie_in_wait(self, kind: str, wanted: Callable[[Sampling], bool]) -> bool:
        """Strike as soon as an answer that is drawn so is being written."""
        self._try_writer(kind, wanted, self._site.loop.now + _HUNT_S)
        return False  # it counts when it has struck

    def _try_writer(self, kind: str, wanted: Callable[[Sampling], bool], until: float) -> None:
        if not self._on or self._site.loop.now > until:
            return
        if self._kill_writer(wanted):
            self.struck[kind] += 1
        else:
            pause = self._random.uniform(0.01, 0.1)
            self._site.loop.after(pause, partial(self._try_writer, kind, wanted, until))

    def _kill_writer(self, wanted: Callable[[Sampling], bool]) -> bool:
        """The worker that is in the middle of an answer that is drawn so."""
        present = self._victims.get("decode")
        if present is not None and self._recovered("decode", present):
            present = None
        for life, attempt in self._writing():
            if wanted(attempt.submit.sampling) and present in (None, life.name):
                self._victims["decode"] = life.name
                return self._kill(life) if self._random.random() < 0.5 else self._kill_engine(life)
        return False

    def _hunt(self) -> bool:
        """Whoever writes one request's answer dies, and who goes on with it, and so on."""
        writing = self._writing()
        if not writing:
            return False
        _, attempt = self._random.choice(writing)
        quarry = attempt.id.rsplit(".", 1)[0]
        self._chase(quarry, self._random.randrange(2, 5), self._site.loop.now + _HUNT_S)
        return True

    def _chase(self, quarry: str, deaths: int, until: float) -> None:
        if not self._on or deaths == 0 or self._site.loop.now > until:
            return
        for life, attempt in self._writing():
            if attempt.id.startswith(f"{quarry}.") and self._other_serves(life):
                self.struck["killed in a hunt"] += 1
                self._victims["decode"] = life.name
                self._busy(life.name, 0.1)
                self._soon(life.kill if self._random.random() < 0.5 else life.kill_engine)
                deaths -= 1
                break
        self._site.loop.after(self._random.uniform(0.01, 0.1), partial(self._chase, quarry, deaths, until))

    def _other_serves(self, life: WorkerLife) -> bool:
        """Whether the other decode worker is there, or will soon be."""
        (other,) = (self._cluster.workers[name] for name in DECODE if name != life.name)
        back_soon = other.process.dead and not other.process.silent and not self._cluster.replaced(other.name)
        return self._site.network.whole and (back_soon or (other.process.up and other.engine.process.up))

    def _lose_limits(self) -> bool:
        """The shared book of limits does not answer for a while."""
        if self._site.limits is None:
            return False
        seconds = self._random.uniform(*self._random.choice(_LOST_S))
        self._site.loop.log(f"the book of limits is away for {seconds:.1f} s")
        self._site.limits.leave(seconds, deaf=self._random.random() < 0.5)
        return True

    def _freeze(self, victim: WorkerLife | None, *, server: bool, engine: bool) -> bool:
        if victim is None:
            return False
        processes = [victim.process] * server + [victim.engine.process] * engine
        return self._freeze_all(victim.name, [p for p in processes if p.up])

    def _freeze_router(self) -> bool:
        victim = self._router()
        return victim is not None and self._freeze_all(victim.name, [victim.process])

    def _freeze_all(self, name: str, processes: list[Process]) -> bool:
        if not processes or not all(process.up for process in processes):
            return False
        seconds = self._random.uniform(*self._random.choice(_FREEZES_S))
        self._busy(name, seconds + 0.1)
        self._soon(lambda: self._freeze_now(processes, seconds))
        return True

    def _freeze_now(self, processes: list[Process], seconds: float) -> None:
        for process in processes:
            self._site.loop.log(f"{process.name} is frozen for {seconds:.2f} s")
            process.freeze()
            self._site.network.frozen(process)
            self._site.loop.after(seconds * self._random.uniform(0.95, 1.0), partial(self._thaw, process))

    def _thaw(self, process: Process) -> None:
        self._site.loop.log(f"{process.name} wakes")
        process.thaw()

    def _partition(self) -> bool:
        victim = self._worker()
        if victim is None:
            return False
        others = [*ROUTERS, *(DECODE if victim.role == "prefill" else PREFILL)]
        other = self._random.choice(others)
        seconds = self._random.uniform(*self._random.choice(_PARTITIONS_S))
        self._busy(victim.name, seconds)
        self._site.loop.log(f"{victim.name} and {other} are cut off from each other for {seconds:.1f} s")
        self._site.network.partition(victim.name, other, seconds)
        return True

    def _break_stream(self) -> bool:
        victim = self._worker()
        if victim is None:
            return False
        streams = [s for s in self._site.network.streams if s.touches(victim.name)]
        return self._break(victim, streams, 0.5, (0.0, 0.05, 3.0))

    def _break_session(self) -> bool:
        """A stream between a router and a decode worker, both alive, while it carries requests."""
        name = self._choose("decode")
        victim = self._cluster.workers[name] if name is not None else None
        if not isinstance(victim, DecodeLife) or not victim.core.state.attempts:
            return False
        streams = [s for s in self._site.network.streams if s.kind == "session" and s.touches(victim.name)]
        return self._break(victim, streams, 0.2, (0.0, 0.05, 0.5))

    def _break(self, victim: WorkerLife, streams: list[Stream], busy_s: float, slowest_s: tuple[float, ...]) -> bool:
        """One of these; its ends notice within one of `slowest_s`."""
        whole = [stream for stream in streams if not stream.broken]
        if not whole:
            return False
        stream = self._random.choice(whole)
        self._busy(victim.name, busy_s)
        self._site.loop.log(f"{stream.name} breaks")
        stream.break_up("connection reset", self._random.choice(slowest_s))
        return True

    def _drain(self) -> bool:
        victim = self._worker()
        if victim is None or not victim.process.up:
            return False
        self._busy(victim.name, 1.0)
        self._site.loop.log(f"{victim.name} is told to leave")
        self._soon(lambda: None if victim.process.dead else victim.process.arrive(victim.drain))
        return True

    def _replace(self) -> bool:
        """A worker freezes and is given up for lost; it wakes beside its successor, and is ended a little later."""
        victim = self._worker()
        if victim is None or self._cluster.replaced(victim.name):
            return False
        if not self._freeze(victim, server=True, engine=True):
            return False
        wakes = self._busy_until[victim.name]
        self._busy(victim.name, wakes - self._site.loop.now + 6.0)
        self._site.loop.at(wakes + self._random.uniform(0.0, 5.0), victim.kill)
        self._cluster.replace(victim.name)
        return True

    def _rot(self) -> bool:
        victim = self._worker()
        if not isinstance(victim, PrefillLife | DecodeLife) or not (blocks := victim.unproved()):
            return False
        share = self._random.choice((0.1, 1.0))
        for block in [b for b in blocks if self._random.random() < share]:
            self._site.loop.log(f"{victim.name}: a byte of block {block} is not what it was")
            memory = victim.engine.local.memory.pool[block]
            memory[self._random.randrange(len(memory))] ^= 1 << self._random.randrange(8)
        return True

    def _soon(self, call: Callable[[], None]) -> None:
        """Just before the message that is about to be taken, or just after it."""
        if self._random.random() < 0.5:
            call()
        else:
            self._site.loop.after(0.0, call)


def _has_grammar(how: Sampling) -> bool:
    return how.grammar.kind != ""


def _penalises(how: Sampling) -> bool:
    return how.presence_penalty != 0 or how.frequency_penalty != 0 or how.repetition_penalty not in (0, 1)
