"""From what is known of workers to figures (router/figures.py). Pure.

One row for each name of a worker: where an earlier life and the present one are both still listed, the one that talks.
Pairs are told by decode workers (proto/watch.proto); those with a prefill worker that does not talk are left out, so
there are never more than live decode x live prefill workers.
"""

from collections.abc import Iterable, Mapping

from router.figures import STATES, Figures, WorkerFigures
from router.workers import Workers, WorkerView

POOLS = ("prefill", "decode")


def figures_of(
    workers: Workers, gauges: Mapping[str, int], counters: Mapping[str, int], now: float, *, ready: bool
) -> Figures:
    """All there is to tell. `gauges`, `counters` and `ready`: the dispatcher's own."""
    views = list(workers.by_address.values())
    return Figures(
        ready=ready,
        members=sum(view.member for view in views),
        states=_count_states(views, now, workers.suspect_s),
        gauges=gauges,
        counters=counters,
        prefix_index=workers.index.describe(),
        workers=tuple(_rows(workers, now)),
    )


def _count_states(views: Iterable[WorkerView], now: float, suspect_s: float) -> dict[tuple[str, str], int]:
    """Workers by (pool, state), zeros included; those whose role nobody knows are of the pool "unknown"."""
    counts = {(pool, state): 0 for pool in (*POOLS, "unknown") for state in STATES}
    for view in views:
        counts[view.role if view.role in POOLS else "unknown", _state(view, now, suspect_s)] += 1
    return counts


def _rows(workers: Workers, now: float) -> list[WorkerFigures]:
    """Those whose role is known, by pool and name."""
    rows: dict[tuple[str, str], WorkerView] = {}
    for view in workers.by_address.values():
        known = rows.get((view.role, view.name))
        if view.role in POOLS and (known is None or _newer(view, known)):
            rows[view.role, view.name] = view
    talking = {view.epoch: view.name for view in rows.values() if view.role == "prefill" and view.report is not None}
    return [_row(view, workers, talking, now) for _, view in sorted(rows.items())]


def _newer(view: WorkerView, known: WorkerView) -> bool:
    return (view.watch.open, view.watch.last_seen) > (known.watch.open, known.watch.last_seen)


def _row(view: WorkerView, workers: Workers, talking: Mapping[int, str], now: float) -> WorkerFigures:
    report, names = view.report, set(talking.values())
    row = WorkerFigures(
        pool=view.role,
        worker=view.name,
        state=_state(view, now, workers.suspect_s),
        restarts=workers.lives.restarts(view.name),
        num_blocks=view.facts.num_blocks,
        age_s=max(0.0, now - view.watch.last_seen),
    )
    if report is not None:
        row.status = report.status
        row.tokens_per_s = report.rates.tokens_per_s if report.rates.prefill else None
        row.pairs = tuple({pair.prefill: pair for pair in report.status.pairs if pair.prefill in names}.values())
        row.links = {talking[epoch]: gb * 1e9 for epoch, gb in report.rates.links.items() if epoch in talking}
    return row


def _state(view: WorkerView, now: float, suspect_s: float) -> str:
    return view.state(now, suspect_s).partition(":")[0]
