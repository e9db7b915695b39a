"""What this router, its workers and their pairs tell, as Prometheus families (docs/metrics.md lists them).

Nothing is kept here but the words that labels have: families are made of the dispatcher's figures whenever somebody
asks. Every router tells of all
workers, so a query over several routers takes the `max by (pool, worker)` of a worker's series before it adds them up.
Labels are bounded: pools, states, our own words for ends and events; workers that exist, and pairs of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cluster.core.handoff_ends import JOB_ENDS, LOCAL_REASONS
from cluster.stubs.watch_pb2 import Pair, Status
from router.figures import STATES, Figures, WorkerFigures, pair_seconds
from router.front.histograms import cumulative
from router.permits import Permits

T = TypeVar("T")
Values = Mapping[tuple[str, ...], float]
PairOf = tuple[WorkerFigures, Pair]
_OWN = {"steps", "prompt_tokens_computed", "prefix_hit_tokens", "tokens_out", "prefill_local"}
_LOCAL = "local: "
_MOST_WORDS, _LONGEST_WORD, _OTHER = 100, 64, "other"  # of one worker or pair
OUTCOMES = ("ok", "cancelled", "invalid", "overloaded", "deadline", "unavailable", "failed")
LEFT = ("failed", "preempted", "refused", "no_prefill", "handed_over", "lost_on_the_way")
DIFFERS = ("digest_mismatch", "kv_blocks_corrupt", "prefix_hit_corrupt", "block_corrupt")  # KV is not what it was
ODDITIES = (
    "sessions_broken", "watch_gaps", "workers_silent", "late_messages", "protocol_breaches", "unknown_messages",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family(Generic[T]):
    """One metric. `read` gives its values by the labels it adds to those of its group; none: it is not known."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    read: Callable[[T], Values]
    labels: tuple[str, ...] = ()


def _one(value: float | None) -> Values:
    return {} if value is None else {(): float(value)}


def _told(read: Callable[[Status], float]) -> Callable[[WorkerFigures], Values]:
    """Of what the worker said last."""
    return lambda worker: {} if worker.status is None else {(): read(worker.status)}


def _counter(name: str) -> Callable[[WorkerFigures], Values]:
    return _told(lambda status: status.counters.get(name, 0))


def _blocks(worker: WorkerFigures) -> Values:
    status = worker.status
    if status is None:
        return {}
    used, cached = status.gauges.get("blocks_in_use", 0), status.cached_blocks
    return {("in_use",): used, ("cached",): cached, ("free",): worker.num_blocks - used - cached}


def _slots(worker: WorkerFigures) -> Values:
    if worker.status is None or worker.pool != "decode":
        return {}
    return {(state,): worker.status.gauges.get(f"slots_{state}", 0) for state in ("in_use", "set_aside")}


def _local(worker: WorkerFigures) -> Values:
    if worker.status is None or worker.pool != "decode":
        return {}
    return _by_word(worker.status.counters, _LOCAL, LOCAL_REASONS)


def _events(worker: WorkerFigures) -> Values:
    if worker.status is None:
        return {}
    counters = dict.fromkeys(DIFFERS, 0) | dict(sorted(worker.status.counters.items()))
    return {(name,): n for name, n in counters.items() if name not in _OWN and not name.startswith(_LOCAL)}


def _state(worker: WorkerFigures) -> Values:
    return {(state,): float(state == worker.state) for state in STATES}


def _in_use(worker: WorkerFigures) -> Values:
    return {} if worker.status is None else {(name,): n for name, n in sorted(worker.status.gauges.items())}


def _pair(read: Callable[[Pair], float]) -> Callable[[PairOf], Values]:
    return lambda pair_of: {(): read(pair_of[1])}


def _ends(pair_of: PairOf) -> Values:
    return _by_word(pair_of[1].jobs, "", JOB_ENDS)


def _parts(pair_of: PairOf) -> Values:
    return {(part,): seconds for part, seconds in pair_seconds(pair_of[1]).items()}


def _speed(pair_of: PairOf) -> Values:
    worker, pair = pair_of
    return _one(worker.links.get(pair.prefill))


def _gauge(name: str) -> Callable[[Figures], Values]:
    return lambda figures: {(): figures.gauges.get(name, 0)}


def _index(name: str) -> Callable[[Figures], Values]:
    return lambda figures: {(): figures.prefix_index.get(name, 0)}


def _outcomes(figures: Figures) -> Values:
    return _by_word(figures.counters, "outcome_", OUTCOMES)


def _left(figures: Figures) -> Values:
    return _by_word(figures.counters, "attempts_", LEFT)


def _oddities(figures: Figures) -> Values:
    return {
        (event,): count
        for event, count in (dict.fromkeys(ODDITIES, 0) | dict(figures.counters)).items()
        if not event.startswith(("outcome_", "attempts_"))
    }


def _desired(figures: Figures) -> Values:
    return {(pool,): count for pool, count in figures.desired.items()}


def _states(figures: Figures) -> Values:
    return {(pool, state): count for (pool, state), count in figures.states.items()}


def _by_word(counters: Mapping[str, int], prefix: str, words: Iterable[str]) -> Values:
    """Counters of one kind. What has not happened yet is 0, so that its first time is seen as a change."""
    counted = {n.removeprefix(prefix): c for n, c in sorted(counters.items()) if n.startswith(prefix)}
    return {(word,): count for word, count in (dict.fromkeys(words, 0) | counted).items()}


class _Words:
    """The words that the one label of each family has had, of each worker or pair.

    Workers say words that this router may not know: of too many, or too long ones, all are `other`. Who is in stays in,
    whatever comes later and in whatever order, or a counter would vanish, or fall, which looks like a restart.
    """

    def __init__(self) -> None:
        self._let_in: dict[tuple[str, ...], set[str]] = {}
        self._asked: set[tuple[str, ...]] = set()

    def bounded(self, series: tuple[str, ...], values: Values) -> Values:
        """Of so many words, in the order in which they are let in. `series`: the family, and its other labels."""
        self._asked.add(series)
        let_in = self._let_in.setdefault(series, set())
        kept: dict[tuple[str, ...], float] = {}
        for (word,), value in values.items():
            if word not in let_in and len(let_in) < _MOST_WORDS and len(word) <= _LONGEST_WORD:
                let_in.add(word)
            label = word if word in let_in else _OTHER
            kept[label,] = kept.get((label,), 0) + value
        return kept

    def forget_the_gone(self) -> None:
        """Of workers and pairs that were not asked for since the last time, none is remembered."""
        self._let_in = {series: words for series, words in self._let_in.items() if series in self._asked}
        self._asked.clear()


ROUTER: tuple[Family[Figures], ...] = (
    Family("gauge", "router_ready", "1: a request could be placed now", lambda f: _one(f.ready)),
    Family("gauge", "queue_requests", "Requests that wait for a place", _gauge("queued")),
    Family("gauge", "queue_tokens", "Their prompt tokens", _gauge("queued_tokens")),
    Family("gauge", "attempts_running", "Attempts on decode workers", _gauge("attempts")),
    Family("gauge", "bookings", "Work sent to workers, of attempts that have not ended", _gauge("bookings")),
    Family("counter", "dispatched", "Requests of the dispatcher, by outcome", _outcomes, ("outcome",)),
    Family("counter", "attempts_left", "Attempts that ended before their request did", _left, ("reason",)),
    Family("counter", "router_events", "What should be rare", _oddities, ("event",)),
    Family("gauge", "members", "Workers that the controller or the seeds name", lambda f: _one(f.members)),
    Family("gauge", "controller_age_seconds", "Since it last told who is there", lambda f: _one(f.told_s)),
    Family("gauge", "desired_programs", "Programs that the controller wants", _desired, ("pool",)),
    Family("gauge", "workers", "Workers by pool and state", _states, ("pool", "state")),
    Family("gauge", "prefix_index_entries", "Cached blocks known here", _index("entries")),
    Family("gauge", "prefix_index_capacity", "How many may be known", _index("capacity")),
    Family("counter", "prefix_index_refused", "Cached blocks that found no room in it", _index("refused")),
)

WORKER: tuple[Family[WorkerFigures], ...] = (
    Family("gauge", "worker_state", "1 for the state it is in", _state, ("state",)),
    Family("gauge", "worker_status_age_seconds", "Since it was last heard of", lambda w: _one(w.age_s)),
    Family("counter", "worker_restarts", "Times it came back as another peer", lambda w: _one(w.restarts)),
    Family("gauge", "worker_blocks", "Blocks of its pool; the three states add up to all", _blocks, ("state",)),
    Family("gauge", "worker_batch_sequences", "Prompts or streams in its batch", _told(lambda s: s.running)),
    Family("gauge", "worker_waiting_requests", "Requests in its line", _told(lambda s: s.waiting)),
    Family("gauge", "worker_handing_off_requests", "Hand-offs in progress", _told(lambda s: s.handing_off)),
    Family("gauge", "worker_queued_tokens", "Prompt tokens to be computed", _told(lambda s: s.queued_tokens)),
    Family("gauge", "worker_context_tokens", "KV positions a decode step reads", _told(lambda s: s.context_tokens)),
    Family("gauge", "worker_prefill_tokens_per_second", "While it computes prompts", lambda w: _one(w.tokens_per_s)),
    Family("counter", "worker_prompt_tokens_computed", "Prompt tokens computed", _counter("prompt_tokens_computed")),
    Family("counter", "worker_prefix_hit_tokens", "Prompt tokens found in its cache", _counter("prefix_hit_tokens")),
    Family("counter", "worker_output_tokens", "Tokens a decode worker sent to routers", _counter("tokens_out")),
    Family("gauge", "worker_slots", "Staging slots of a decode worker", _slots, ("state",)),
    Family("gauge", "worker_in_use", "All it holds for somebody; 0 when idle", _in_use, ("resource",)),
    Family("counter", "worker_local_prefills", "Prompts a decode worker computed itself", _local, ("reason",)),
    Family("counter", "worker_events", "Its other counters", _events, ("event",)),
)

PAIR: tuple[Family[PairOf], ...] = (
    Family("counter", "pair_jobs_sent", "Jobs given to the prefill worker", _pair(lambda p: p.jobs_sent)),
    Family("counter", "pair_jobs", "Jobs by their one end", _ends, ("outcome",)),
    Family("counter", "pair_kv_bytes", "Bytes of verified blocks", _pair(lambda p: p.kv_bytes)),
    Family("counter", "pair_transfer_seconds", "Where the time of hand-offs went", _parts, ("part",)),
    Family("gauge", "pair_slots_set_aside", "Slots kept for reads that go on", _pair(lambda p: p.slots_set_aside)),
    Family("gauge", "pair_link_bytes_per_second", "What reads reached when the link was warmed", _speed),
)

STEPS = ("headrace_worker_step_seconds", "How long its engine's steps take")


class FleetCollector:
    """For a registry. `permits`: those of this router."""

    def __init__(self, figures: Callable[[], Figures], permits: Permits) -> None:
        self._figures = figures
        self._permits = permits
        self._words = _Words()

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return self._families(Figures(), _Words())

    def collect(self) -> Iterator[Metric]:
        yield from self._families(self._figures(), self._words)

    def _families(self, figures: Figures, words: _Words) -> Iterator[Metric]:
        yield from _metrics(ROUTER, (), [((), figures)], words)
        yield from _permits(self._permits)
        named = [((w.pool, w.worker), w) for w in figures.workers]
        yield from _metrics(WORKER, ("pool", "worker"), named, words)
        yield _steps(figures.workers)
        pairs = [((pair.prefill, w.worker), (w, pair)) for w in figures.workers for pair in w.pairs]
        yield from _metrics(PAIR, ("prefill", "decode"), pairs, words)
        words.forget_the_gone()


def _metrics(
    families: Iterable[Family[T]], labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], T]], words: _Words
) -> Iterator[Metric]:
    rows = list(rows)
    for family in families:
        make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = make(f"headrace_{family.name}", family.help, labels=[*labels, *family.labels])
        for named, row in rows:
            values = family.read(row)
            if len(family.labels) == 1:
                values = words.bounded((family.name, *named), values)
            for added, value in values.items():
                metric.add_metric([*named, *added], value)
        yield metric


def _permits(permits: Permits) -> Iterator[Metric]:
    yield GaugeMetricFamily("headrace_permits_in_use", "Requests within limits of tenants", value=permits.held())
    shared = "1: limits of tenants are shared in a Redis"
    yield GaugeMetricFamily("headrace_redis_configured", shared, value=permits.shared)
    yield GaugeMetricFamily("headrace_redis_up", "1: it answered last time, or is not needed", value=permits.well)


def _steps(workers: Iterable[WorkerFigures]) -> Metric:
    """Of workers whose histogram is one: a count for each bound, and one more. Another's is left out, not the page."""
    metric = HistogramMetricFamily(*STEPS, labels=["pool", "worker"])
    for worker in workers:
        if worker.status is None:
            continue
        steps = worker.status.steps
        if len(steps.counts) == len(steps.bounds_s) + 1:
            metric.add_metric([worker.pool, worker.worker], cumulative(steps.bounds_s, steps.counts), steps.sum_s)
    return metric
