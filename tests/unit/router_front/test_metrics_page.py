"""docs/metrics.md lists what /metrics has: names, kinds and labels."""

import re
from typing import Any, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from cluster.core.clock import ManualClock
from cluster.core.handoff_ends import JOB_ENDS, LOCAL_REASONS, Cause
from router.figures import Figures
from router.front.auth import Gate
from router.front.fleet_metrics import FleetCollector
from router.front.metrics import FrontMetrics
from router.front.usage_metrics import UsageCollector
from tests.metrics_page import PAGE, listed_metrics


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


def words_of(metric: str) -> tuple[list[str], list[str]]:
    """The words that the page lists for a metric: those before `or why it was left`, and those after."""
    (told,) = re.findall(rf"^\| `{metric}` .*\| [^|:]*: ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    own, _, causes = re.sub(r" \([^)]*\)", "", told).partition(", or why ")
    return own.split(", "), causes.partition(": ")[2].split(", ")


def test_the_page_lists_every_end_of_a_job_and_no_other() -> None:
    own, causes = words_of("headrace_pair_jobs_total")
    assert causes == list(get_args(Cause))
    assert [*own, *causes] == list(JOB_ENDS)


def test_the_page_lists_every_reason_of_a_local_prefill_and_no_other() -> None:
    own, _ = words_of("headrace_worker_local_prefills_total")
    assert {*own, *get_args(Cause)} == set(LOCAL_REASONS)


def test_names_carry_their_unit_and_labels_are_of_a_bounded_few() -> None:
    bounded = {"api", "outcome", "part", "pool", "worker", "state", "reason", "event", "resource", "prefill", "decode"}
    bounded |= {"tenant", "kind", "currency"}
    assert {label for _, _, labels in exposed() for label in labels} <= bounded
    assert all(name.endswith("_seconds") for name, kind, _ in exposed() if kind == "histogram")
