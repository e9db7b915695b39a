"""What this router counted of tenants' usage, and whom it let in, as metrics."""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.usage import NOTHING, Sums, Who
from cluster.usage_report import cost_of
from router.front.auth import Gate


class UsageCollector:
    """This router's own counts since it started, by tenant: names from the configuration, and no others. Of who has
    not asked yet there are zeros, or what its first interval brought would be no change.

    /usage has everybody's, and those of routers that are gone.
    """

    def __init__(self, gate: Gate, model: str = "") -> None:
        """`model`: the one that is served here, for its price."""
        self._gate = gate
        self._model = model

    def describe(self) -> Iterable[Metric]:
        """All of its families, without samples."""
        return (*self._families(), *self._of_the_book(0.0, 0.0), self._refused(0))

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        settings, known = self._gate.usage, self._gate.tenants.weights.keys() or {""}
        used = {who: sums for who, sums in self._gate.ledger.total().items() if who.tenant in known}
        requests, tokens, characters, cost = self._families()
        for tenant, sums in _by_tenant(used, known).items():
            requests.add_metric([tenant], sums.requests)
            for kind, count in (
                ("input", sums.input_tokens),
                ("cached", sums.cached_tokens),
                ("output", sums.output_tokens),
            ):
                tokens.add_metric([tenant, kind], count)
            characters.add_metric([tenant, "input"], sums.input_characters)
            characters.add_metric([tenant, "output"], sums.output_characters)
        for tenant, amount in self._costs(used, known).items():
            cost.add_metric([tenant, settings.currency], float(amount))
        yield from (requests, tokens, characters, cost)
        yield from self._of_the_book(float(self._gate.ledger.book_up), float(self._gate.ledger.waiting()))
        yield self._refused(self._gate.tenants.refused)

    def _costs(self, used: Mapping[Who, Sums], known: Iterable[str]) -> dict[str, Decimal]:
        """By tenant; nothing of a model that has no price."""
        price_of = self._gate.usage.price_of
        costs = dict.fromkeys(sorted(known), Decimal(0)) if price_of(self._model) is not None else {}
        for who, sums in used.items():
            if (price := price_of(who.model)) is not None:
                costs[who.tenant] = costs.get(who.tenant, Decimal(0)) + cost_of(sums, price)
        return costs

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily]:
        """The cost is a gauge: what of a prompt was cached is known at the end of its answer, and makes it cheaper."""
        kinds = ["tenant", "kind"]
        return (
            CounterMetricFamily("headrace_usage_requests", "Requests that were answered", labels=["tenant"]),
            CounterMetricFamily("headrace_usage_tokens", "Tokens handed over", labels=kinds),
            CounterMetricFamily("headrace_usage_characters", "Characters of prompts and of answers", labels=kinds),
            GaugeMetricFamily(
                "headrace_usage_cost", "At the prices set, since the start", labels=["tenant", "currency"]
            ),
        )

    @staticmethod
    def _refused(calls: int) -> Metric:
        return CounterMetricFamily("headrace_unauthenticated", "Calls that no valid key came with", value=calls)

    @staticmethod
    def _of_the_book(up: float, unwritten: float) -> tuple[Metric, Metric]:
        return (
            GaugeMetricFamily("headrace_usage_book_up", "1: what was counted can be written", value=up),
            GaugeMetricFamily("headrace_usage_unwritten", "Sums that are not written yet", value=unwritten),
        )


def _by_tenant(used: Mapping[Who, Sums], known: Iterable[str]) -> dict[str, Sums]:
    total = dict.fromkeys(sorted(known), NOTHING)
    for who, sums in sorted(used.items()):
        total[who.tenant] = total[who.tenant].plus(sums)
    return total
