"""What this router counted of tenants' usage, as metrics."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.usage import NOTHING, Sums, Who
from cluster.usage_report import cost_of
from router.front.auth import Gate


class UsageCollector:
    """This router's own counts since it started, by tenant: names from the configuration, and no others.

    /usage has everybody's, and those of routers that are gone.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        settings, known = self._gate.usage, self._gate.tenants.weights.keys() or {""}
        used = {who: sums for who, sums in self._gate.ledger.total().items() if who.tenant in known}
        tokens = CounterMetricFamily("headrace_usage_tokens", "Tokens handed over", labels=["tenant", "kind"])
        characters = CounterMetricFamily(
            "headrace_usage_characters", "Characters of prompts and of answers", labels=["tenant", "kind"]
        )
        requests = CounterMetricFamily("headrace_usage_requests", "Requests that were answered", labels=["tenant"])
        cost = CounterMetricFamily(
            "headrace_usage_cost", "At the prices of the configuration", labels=["tenant", "currency"]
        )
        for tenant, sums in _by_tenant(used).items():
            requests.add_metric([tenant], sums.requests)
            for kind, count in (
                ("input", sums.input_tokens),
                ("cached", sums.cached_tokens),
                ("output", sums.output_tokens),
            ):
                tokens.add_metric([tenant, kind], count)
            characters.add_metric([tenant, "input"], sums.input_characters)
            characters.add_metric([tenant, "output"], sums.output_characters)
        for who, sums in used.items():
            if (price := settings.price_of(who.model)) is not None:
                cost.add_metric([who.tenant, settings.currency], float(cost_of(sums, price)))
        yield from (requests, tokens, characters, cost)
        up = float(self._gate.ledger.book_up)
        yield GaugeMetricFamily("headrace_usage_book_up", "1: what was counted can be written", value=up)
        waiting = float(self._gate.ledger.waiting())
        yield GaugeMetricFamily("headrace_usage_unwritten", "Sums that are not written yet", value=waiting)


def _by_tenant(used: dict[Who, Sums]) -> dict[str, Sums]:
    total: dict[str, Sums] = {}
    for who, sums in sorted(used.items()):
        total[who.tenant] = total.get(who.tenant, NOTHING).plus(sums)
    return total
