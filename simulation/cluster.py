"""A simulated cluster: two routers, two workers of each role, and a controller that starts again what died."""

from functools import partial

from cluster.stubs.common_pb2 import WorkerAddress
from simulation.decode import DecodeLife
from simulation.prefill import PrefillLife
from simulation.router_life import RouterLife
from simulation.site import Server, Site
from simulation.worker import WorkerLife

ROUTERS = ("router-0", "router-1")
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
_NEWS_S = (0.02, 0.5)  # until a program has the controller's newest list
_RESTART_S = (0.3, 2.5)
_SILENCE_S = (1.0, 8.0)  # until the controller notices that a host has gone


class Cluster:
    """The programs that run now, by name."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.workers: dict[str, WorkerLife] = {}
        self.routers: dict[str, RouterLife] = {}
        self._members: dict[str, WorkerLife] = {}
        self._ports = 4000
        self._replaced: set[str] = set()  # names whose successor is under way while they may still run
        self._relieved: list[WorkerLife] = []  # lives that were replaced; each is ended some time after it wakes
        site.gone = self._gone
        site.calm = self._calm
        for name in (*PREFILL, *DECODE):
            self._start_worker(name, None)
        for name in ROUTERS:
            self._start_router(name)

    def prefill(self, name: str) -> PrefillLife:
        life = self.workers[name]
        assert isinstance(life, PrefillLife)
        return life

    def decode(self, name: str) -> DecodeLife:
        life = self.workers[name]
        assert isinstance(life, DecodeLife)
        return life

    def sees_ready(self, router: RouterLife, workers: list[WorkerLife]) -> bool:
        """Whether a router may give work to these lives of workers."""
        rows = router.core.status(self.site.loop.now)["workers"]
        assert isinstance(rows, list)
        ready = {(row["address"], row["epoch"]) for row in rows if row["state"] == "ready"}
        return all((life.address, f"{life.epoch:016x}") in ready for life in workers)

    def settled(self) -> bool:
        """Everybody is up, knows everybody, and nobody holds half of a stream."""
        lives = list(self.workers.values())
        if any(not life.process.up or not life.engine.process.up or life.lost for life in lives):
            return False
        streams = self.site.network.streams
        if not self.site.network.whole or any(not s.client.open or not s.server.open or s.broken for s in streams):
            return False
        if sum(s.kind == "link" for s in streams) != len(PREFILL) * len(DECODE):
            return False
        return all(router.process.up and self.sees_ready(router, lives) for router in self.routers.values())

    def _calm(self) -> bool:
        """Every worker runs, and nobody is cut off from anybody."""
        lives = self.workers.values()
        up = all(life.process.up and life.engine.process.up and not life.lost for life in lives)
        return up and self.site.network.whole

    # -- the controller ---------------------------------------------------------------------------------------------

    def _start_worker(self, name: str, address: str | None) -> None:
        if address is None:
            self._ports += 1
            address = f"{name}:{self._ports}"
        kind = PrefillLife if name in PREFILL else DecodeLife
        life = self.workers[name] = self._members[name] = kind(self.site, name, address)
        self._replaced.discard(name)
        life.start()
        self._spread()

    def _start_router(self, name: str) -> None:
        self.routers[name] = RouterLife(self.site, name)
        self.routers[name].start()
        self._tell(name)

    def replace(self, name: str) -> None:
        """The controller cannot reach a worker: it starts another of that name, while the old one may yet wake."""
        self._replaced.add(name)
        self._relieved.append(self.workers[name])
        self._restart(self.workers[name], 0.0)

    @property
    def relieved_have_ended(self) -> bool:
        """Whether no life runs any more that was given up for lost; its peers rightly keep its links until then."""
        return all(life.process.dead for life in self._relieved)

    def replaced(self, name: str) -> bool:
        """Whether a successor of this worker is under way already."""
        return name in self._replaced

    def _gone(self, life: Server) -> None:
        """A program has died: tell the others, start it again - on the same address, or on another one."""
        loop, name = self.site.loop, life.name
        if name in ROUTERS:
            loop.after(loop.random.uniform(*_RESTART_S), partial(self._start_router, name))
        elif life is self.workers[name] and name not in self._replaced:
            noticed = loop.random.uniform(*_SILENCE_S) if life.process.silent else 0.0
            self._restart(self.workers[name], noticed)

    def _restart(self, dead: WorkerLife, noticed_s: float) -> None:
        loop = self.site.loop
        loop.after(noticed_s, partial(self._noticed, dead.name, dead))
        address = dead.address if loop.chance(0.3) and dead.process.dead else None
        loop.after(noticed_s + loop.random.uniform(*_RESTART_S), partial(self._start_worker, dead.name, address))

    def _noticed(self, name: str, dead: WorkerLife) -> None:
        if self._members.get(name) is dead:
            del self._members[name]
            self._spread()

    def _spread(self) -> None:
        loop = self.site.loop
        for name in (*ROUTERS, *DECODE):
            loop.after(loop.random.uniform(*_NEWS_S), partial(self._tell, name))

    def _tell(self, name: str) -> None:
        """A program reads the newest list; a frozen one when it wakes."""
        if name in self.routers:
            self.routers[name].process.arrive(partial(self._tell_router, self.routers[name]))
        elif name in self.workers:
            self.workers[name].process.arrive(partial(self._tell_decode, self.decode(name)))

    def _tell_router(self, router: RouterLife) -> None:
        router.members([life.address for life in self._members.values()])

    def _tell_decode(self, worker: DecodeLife) -> None:
        addresses = [
            WorkerAddress(worker=life.name, epoch=life.epoch, address=life.address)
            for life in self._members.values()
            if life.role == "prefill"
        ]
        worker.members(addresses)
