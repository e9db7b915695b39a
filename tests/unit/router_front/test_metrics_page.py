"""docs/metrics.md lists what /metrics has: names, kinds and labels."""

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from cluster.core.clock import ManualClock
from router.figures import Figures
from router.front.auth import Gate
from router.front.fleet_metrics import FleetCollector
from router.front.metrics import FrontMetrics
from router.front.usage_metrics import UsageCollector
from tests.metrics_page import listed_metrics


def exposed() -> list[tuple[str, str, tuple[str, ...]]]:
    registry = CollectorRegistry()
    FrontMetrics(registry, ManualClock())
    registry.register(FleetCollector(Figures, Gate().permits))
    registry.register(UsageCollector(Gate()))
    collectors: list[Any] = list(registry._collector_to_names)
    metrics = [metric for each in collectors for metric in each.describe()]
    own = [each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)]
    labels = {each._name: tuple(each._labelnames) for each in own}
    return [(m.name, m.type, labels.get(m.name, tuple(getattr(m, "_labelnames", ())))) for m in metrics]


def test_the_page_lists_every_metric_and_no_other() -> None:
    listed = listed_metrics()
    assert len({name for name, *_ in listed}) == len(listed)
    assert sorted(listed) == sorted(exposed())


def test_names_carry_their_unit_and_labels_are_of_a_bounded_few() -> None:
    bounded = {"api", "outcome", "part", "pool", "worker", "state", "reason", "event", "resource", "prefill", "decode"}
    bounded |= {"tenant", "kind", "currency"}
    assert {label for _, _, labels in exposed() for label in labels} <= bounded
    assert all(name.endswith("_seconds") for name, kind, _ in exposed() if kind == "histogram")
