"""No tenant starves at a router: while it has somebody waiting, the others get no more than their share (DESIGN §4.3).

What is served is counted from outside, as work (router/fairness.py: tokens read, and twice those written) divided by
the tenant's weight. A request that fits nowhere may be overtaken for a while, so a tenant is watched from when it has
waited for PATIENCE_S in calm. From then on each other tenant may get what a few of the largest requests come to.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from router.fairness import work_of
from simulation.client import Client
from simulation.scenario import Share
from simulation.site import Violation

PATIENCE_S = 5.0  # overtaking, and the longest step in the way of the worker that is kept free then
LARGEST = 160.0  # work of the largest request that is asked here
FEW = 3


class Turns:
    """Those that wait at one router, by tenant. `calm`: whether every worker could serve now."""

    def __init__(self, shares: Sequence[Share], calm: Callable[[], bool]) -> None:
        self._weights = {share.tenant.name: share.weight for share in shares}
        self._bound = FEW * LARGEST / min(self._weights.values(), default=1.0)
        self._calm = calm
        self._waiting: dict[str, dict[Client, None]] = {name: {} for name in self._weights}
        self._since: dict[str, float] = {}
        self._passed: dict[str, dict[str, list[Client]]] = {}

    def arrived(self, client: Client, now: float) -> None:
        """One that takes a place in the line, unless it is placed within this event."""
        if len(self._weights) > 1:
            tenant = client.request.tenant
            if not self._waiting[tenant]:
                self._restart(tenant, now)
            self._waiting[tenant][client] = None

    def look(self, now: float) -> None:
        """After an event: who has left the line? Raises Violation."""
        served = [client for waiting in self._waiting.values() for client in waiting if client.over or client.placed]
        if not served:
            return
        for client in served:
            del self._waiting[client.request.tenant][client]
        if not self._calm():
            for tenant in self._weights:
                self._restart(tenant, now)
            return
        for client in served:
            if client.placed:
                self._restart(client.request.tenant, now)
                self._count(client, now)

    def _restart(self, tenant: str, now: float) -> None:
        self._since[tenant] = now
        self._passed[tenant] = defaultdict(list)

    def _count(self, served: Client, now: float) -> None:
        name = served.request.tenant
        for tenant, waiting in self._waiting.items():
            if tenant == name or not waiting or now - self._since[tenant] < PATIENCE_S:
                continue
            passed = self._passed[tenant][name]
            passed.append(served)
            if sum(map(_work, passed)) / self._weights[name] > self._bound:
                waited = f"nobody of tenant {tenant} was served for {now - self._since[tenant]:.1f} s"
                raise Violation(f"I7: {waited}, but {len(passed)} requests of {name} were")


def _work(client: Client) -> float:
    """What it has come to by now, which is no more than what its tenant was charged."""
    return work_of(len(client.request.prompt), sum(map(len, client.got)))
