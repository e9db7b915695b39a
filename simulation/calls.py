"""What clients ask in one go, and the ledger of it: what the books of limits must come to, seen from outside."""

from dataclasses import dataclass

from cluster.core.errors import HeadraceError, Overloaded, RateLimited
from cluster.quotas import QuotasUnavailable
from router.tenants import ANONYMOUS, Tenant
from simulation.client import Client
from simulation.limits import LONGEST_LEASE_S, Held
from simulation.site import Site, Violation

SETTLED_S = 0.1
"""A call that has ended is settled in the book by then: longer than an answer of the book takes (limits.py)."""
LEAVES_PERMITS = ("kill router", "freeze router", "lose limits")
"""After these a permit may be held, or be given twice, until it has run out."""


@dataclass(slots=True, eq=False)
class Call:
    """One prompt, or several of which the first failure ends all. `held`: its permit, once it was let in."""

    clients: list[Client]
    router: str
    tenant: Tenant = ANONYMOUS
    held: Held | None = None
    error: HeadraceError | None = None
    ended_at: float | None = None

    @property
    def over(self) -> bool:
        return all(client.over for client in self.clients)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(client.request.prompt) for client in self.clients)

    def ended(self, now: float) -> None:
        """No client waits any more: the permit is given back."""
        self.ended_at = now
        if self.held is not None:
            written = sum(len(got) for client in self.clients for got in client.got)
            self.held.leave(written, self.error)


class Ledger:
    """All calls of a run."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._calls: dict[str, list[Call]] = {}

    def let_in(self, call: Call) -> None:
        """Raises Violation when its tenant has more calls at the same time than it may."""
        self._calls.setdefault(call.tenant.name, []).append(call)
        limit, scenario = call.tenant.quota.concurrency, self._site.scenario
        if limit is None or (scenario.shared_limits and set(scenario.faults) & set(LEAVES_PERMITS[1:])):
            return
        running = [c for c in self._within_reach(call) if not c.over]
        if len(running) > limit:
            raise Violation(f"I2: tenant {call.tenant.name} has {len(running)} calls at a time, {limit} are allowed")

    def refused(self, call: Call, error: HeadraceError, now: float) -> None:
        """Raises Violation for a refusal without a hint, and for one by a limit that cannot have been met."""
        if isinstance(error, Overloaded) and not 0 < error.retry_after_s <= 60:
            raise Violation(f"I3: refused with the hint {error.retry_after_s} s: {error}")
        if isinstance(error, QuotasUnavailable):  # the answer may be all that was lost: its permit is held then
            self._calls.setdefault(call.tenant.name, []).append(call)
        if not isinstance(error, RateLimited):
            return
        scenario = self._site.scenario
        left_over = scenario.shared_limits and set(scenario.faults) & set(LEAVES_PERMITS)
        quota, since = call.tenant.quota, now - (LONGEST_LEASE_S if left_over else SETTLED_S)
        if quota.concurrency is None or quota.tokens_per_minute is not None or quota.requests_per_minute is not None:
            return
        holding = [c for c in self._within_reach(call) if c.ended_at is None or c.ended_at > since]
        if len(holding) < quota.concurrency:
            few = f"{len(holding)} of {quota.concurrency} calls"
            raise Violation(f"I2: tenant {call.tenant.name} is refused with {few}")

    def _within_reach(self, call: Call) -> list[Call]:
        """The calls of this tenant that the same book counts."""
        shared = self._site.scenario.shared_limits
        return [c for c in self._calls.get(call.tenant.name, ()) if shared or c.router == call.router]
