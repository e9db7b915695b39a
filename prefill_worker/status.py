"""What routers see of a prefill worker twice a second (proto/watch.proto)."""

from collections.abc import Iterable, Mapping

from cluster.core.config import ClusterConfig
from cluster.stubs.watch_pb2 import Durations, PrefillRate, Rates, Status
from engine.batcher import Batcher
from engine.overdue import OverdueWatch
from engine.rates import report_queue
from prefill_worker.jobs import Job, Phase


def make_status(
    config: ClusterConfig, jobs: Iterable[Job], batcher: Batcher, pace: OverdueWatch, counters: Mapping[str, int]
) -> Status:
    """Everything but `draining`."""
    phases, queue = [], []
    for job in jobs:
        phases.append(job.phase)
        queue.append(job.remaining)
    books = batcher.books
    return Status(
        ready=not pace.is_late,
        free_blocks=books.available,
        running=phases.count(Phase.RUNNING),
        waiting=phases.count(Phase.CHECKING),
        queued_tokens=sum(queue),
        queue=report_queue(queue),
        window_tokens=config.handoff.admission_window_tokens,
        cached_blocks=books.cached,
        steps=Durations(bounds_s=pace.steps.bounds, counts=pace.steps.counts, sum_s=pace.steps.sum_s),
        rates=Rates(
            prefill=[PrefillRate(depth=depth, tokens_per_s=rate) for depth, rate in pace.rates.prefill()],
            chunk_tokens=config.chunk_tokens("prefill"),
        ),
        gauges={
            "blocks_in_use": books.in_use,
            "jobs": len(phases),
            "jobs_pinned": phases.count(Phase.DONE),
            "sequences": len(batcher.sequences),
        },
        counters=counters,
    )
