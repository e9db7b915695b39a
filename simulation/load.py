"""Seeded clients: what they ask, when, and what they do meanwhile. Looks at all of them once a second (I3, I7)."""

from functools import partial

from router.requests import Request
from router.tenants import ANONYMOUS
from simulation.asks import DEADLINE_S, Asks
from simulation.calls import Call, Ledger
from simulation.client import Client, Wish
from simulation.cluster import Cluster
from simulation.router_life import RouterLife
from simulation.scenario import Share
from simulation.site import Site, Violation

GRACE_S = 1.0
PATIENCE_S = 30.0  # with work present, some token or end comes within this time


class Load:
    """All clients of one run, with the life of the router that each talks to."""

    def __init__(self, site: Site, cluster: Cluster) -> None:
        self.clients: dict[Client, RouterLife] = {}
        self.asked = 0
        self._named = 0
        self._site = site
        self._cluster = cluster
        self._random = site.loop.random
        self._asks = Asks(self._random, site.scenario)
        self._ledger = Ledger(site)

    def begin(self) -> None:
        """Spread the requests of the scenario over its span."""
        for _ in range(self._site.scenario.requests):
            self._site.loop.after(self._random.uniform(0.0, self._site.scenario.span_s) + 1.0, self._ask_something)
        self._site.loop.after(1.0, self._watch)

    @property
    def over(self) -> bool:
        """Whether every request of the scenario was asked and has its outcome."""
        return self.asked >= self._site.scenario.requests and all(client.over for client in self.clients)

    def ask_to_prove(self, router: RouterLife) -> Client:
        """One request that nobody's limit is in the way of."""
        share = self._site.scenario.shares[0] if self._site.scenario.shares else None
        return self._ask(router, [self._request(share)], Wish(), share).clients[0]

    def _request(self, share: Share | None, deadline_s: float = DEADLINE_S) -> Request:
        self._named += 1
        return self._asks.request(f"request-{self._named}", share, deadline_s)

    def _ask(self, router: RouterLife, requests: list[Request], wish: Wish, share: Share | None) -> Call:
        """Send one call through a router. `wish`: of its first prompt."""
        loop = self._site.loop
        wishes = [wish, *(Wish() for _ in requests[1:])]
        model = self._site.scenario.model
        clients = [Client(r, w, model, router.name, loop.now) for r, w in zip(requests, wishes, strict=True)]
        for client in clients:
            client.excused_s = -router.process.frozen_s
            self.clients[client] = router
            if loop.traced:
                loop.log(f"client asks {router.name}: {_brief(client.request)} {client.wish}")
        call = Call(clients, router.name, ANONYMOUS if share is None else share.tenant)
        router.ask(call)
        if call.held is None and call.error is not None:
            self._ledger.refused(call, call.error, loop.now)
        else:
            self._ledger.let_in(call)
        if wish.cancel_after_s is not None:
            loop.after(wish.cancel_after_s, partial(self._cancel, call))
        return call

    def _ask_something(self) -> None:
        self.asked += 1
        routers = [router for router in self._cluster.routers.values() if router.process.up]
        rng, shares = self._random, self._site.scenario.shares
        share = rng.choices(shares, [share.asks for share in shares])[0] if shares else None
        deadline = rng.uniform(0.05, 4.0) if rng.random() < 0.1 else DEADLINE_S
        wish = Wish(cancel_after_s=rng.expovariate(2.0) if rng.random() < 0.15 else None)
        prompts = rng.randrange(2, 4) if rng.random() < self._site.scenario.batches else 1
        requests = [self._request(share, deadline) for _ in range(prompts)]
        if rng.random() < 0.15:
            wish.stop_at = {rng.randrange(requests[0].n): rng.randrange(1, max(1, requests[0].max_tokens) + 1)}
        self._ask(rng.choice(routers), requests, wish, share)

    def _cancel(self, call: Call) -> None:
        router = self.clients[call.clients[0]]
        router.process.arrive(partial(router.cancel, call))

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


def _brief(request: Request) -> str:
    """What was asked, for a trace."""
    grammar = "" if request.grammar is None else f" {request.grammar.kind}"
    return (
        f"{request.request_id} {request.tenant} prompt {len(request.prompt)} max {request.max_tokens}"
        f" n {request.n} deadline {request.deadline_s:g}{grammar}"
    )
