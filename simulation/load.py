"""Seeded clients: what they ask, when, and what they do meanwhile. Looks at all of them once a second (I3, I7)."""

from functools import partial

from router.requests import Request, SamplingParams, worst_blocks
from simulation.client import Client, Wish
from simulation.cluster import Cluster
from simulation.router_life import RouterLife
from simulation.scenario import BLOCK, VOCAB
from simulation.site import Site, Violation

DEADLINE_S = 60.0
GRACE_S = 1.0
PATIENCE_S = 30.0  # with work present, some token or end comes within this time


class Load:
    """All clients of one run, with the life of the router that each talks to."""

    def __init__(self, site: Site, cluster: Cluster) -> None:
        self.clients: dict[Client, RouterLife] = {}
        self.asked = 0
        self._site = site
        self._cluster = cluster
        self._random = site.loop.random
        self._systems = [self._tokens(self._random.randrange(1, 6) * BLOCK) for _ in range(2)]

    def begin(self) -> None:
        """Spread the requests of the scenario over its span."""
        for _ in range(self._site.scenario.requests):
            self._site.loop.after(self._random.uniform(0.0, self._site.scenario.span_s) + 1.0, self._ask_something)
        self._site.loop.after(1.0, self._watch)

    @property
    def over(self) -> bool:
        """Whether every request of the scenario was asked and has its outcome."""
        return self.asked >= self._site.scenario.requests and all(client.over for client in self.clients)

    def ask(self, router: RouterLife, request: Request, wish: Wish) -> Client:
        """Send one request through a router."""
        loop = self._site.loop
        client = Client(request, wish, self._site.scenario.model, router.name, loop.now)
        client.excused_s = -router.process.frozen_s
        self.clients[client] = router
        if loop.traced:
            loop.log(
                f"client asks {router.name}: {request.request_id} prompt {len(request.prompt)}"
                f" max {request.max_tokens} n {request.n} deadline {request.deadline_s:g} {wish}"
            )
        router.ask(client)
        if wish.cancel_after_s is not None:
            loop.after(wish.cancel_after_s, partial(self._cancel, client))
        return client

    def request(self, deadline_s: float = DEADLINE_S) -> Request:
        """Something that fits both pools in the worst case, as the front door makes sure of."""
        rng, config = self._random, self._site.scenario.config
        room = min(config.num_blocks("decode"), config.num_blocks("prefill"))
        while True:
            n = rng.choice((1, 1, 1, 2))
            shared = rng.choice(self._systems) if rng.random() < 0.5 else []
            prompt = shared + self._tokens(rng.randrange(1, 40))
            count = rng.randrange(1, 24)
            if worst_blocks(len(prompt), n, count, BLOCK) <= room:
                break
        greedy = rng.random() < 0.5
        sampling = SamplingParams(
            temperature=0.0 if greedy else 0.9, top_p=1.0 if greedy else 0.95, seed=rng.getrandbits(64)
        )
        stops = tuple(rng.sample(range(VOCAB), 8)) if rng.random() < 0.2 else ()
        name = f"request-{len(self.clients)}"
        return Request(
            name, name, tuple(prompt), count, n, sampling, (), stops,
            ignore_eos=rng.random() < 0.5, deadline_s=deadline_s, salt=rng.choice((b"", b"tenant")),
        )  # fmt: skip

    def _ask_something(self) -> None:
        self.asked += 1
        routers = [router for router in self._cluster.routers.values() if router.process.up]
        rng = self._random
        deadline = rng.uniform(0.05, 4.0) if rng.random() < 0.1 else DEADLINE_S
        wish = Wish(cancel_after_s=rng.expovariate(2.0) if rng.random() < 0.15 else None)
        request = self.request(deadline)
        if rng.random() < 0.15:
            wish.stop_at = {rng.randrange(request.n): rng.randrange(1, request.max_tokens + 1)}
        self.ask(rng.choice(routers), request, wish)

    def _cancel(self, client: Client) -> None:
        router = self.clients[client]
        router.process.arrive(partial(router.cancel, client))

    def _watch(self) -> None:
        now = self._site.loop.now
        for client, router in self.clients.items():
            if client.over or not router.process.up:
                continue
            excused = client.excused_s + router.process.frozen_s
            waited = now - client.arrived - excused
            if waited > client.request.deadline_s + GRACE_S:
                raise Violation(f"I3: {client.request.request_id} has no outcome {waited:.1f} s after it came")
            if now - client.progress_at - excused > PATIENCE_S:
                raise Violation(f"I7: nothing happens to {client.request.request_id} since {client.progress_at:.1f}")
        self._site.loop.after(1.0, self._watch)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(VOCAB - 1), k=count)
