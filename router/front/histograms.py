"""Prometheus histograms of durations that are counted on the event loop alone: no locks, and cells found by bisection.

A token event costs half of what it does with prometheus_client's own histogram (measured: 0.9 us, and 1.8).
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from cluster.core.durations import Durations


class DurationFamily:
    """One metric, in seconds, by the values of its labels."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._told = (name, text)
        self._labels = tuple(labels)
        self._bounds = bounds
        self._by_values: dict[tuple[str, ...], Durations] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Durations:
        """To be kept by who adds often."""
        if values not in self._by_values:
            self._by_values[values] = Durations(self._bounds)
        return self._by_values[values]

    def describe(self) -> Iterable[Metric]:
        """Without values."""
        yield HistogramMetricFamily(*self._told, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(*self._told, labels=self._labels)
        for values, durations in self._by_values.items():
            metric.add_metric(values, cumulative(durations.bounds, durations.counts), durations.sum_s)
        yield metric


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: how many were at most so long."""
    buckets, total = [], 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
