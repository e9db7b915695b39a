"""The fleet in numbers, as one router sees it now: what metrics and pages are made of (router/fleet.py fills it in)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.pipe import Role
from cluster.stubs.watch_pb2 import Pair, Status

STATES = ("ready", "draining", "starting", "suspect", "lost", "mismatch", "connecting")


@dataclass(slots=True)
class WorkerFigures:
    """One worker. `status` None: it does not talk. `links`: bytes per second by prefill worker, as warming measured."""

    pool: str
    worker: str
    state: str
    restarts: int
    num_blocks: int
    age_s: float
    status: Status | None = None
    tokens_per_s: float | None = None
    pairs: tuple[Pair, ...] = ()
    links: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it. `states`: how many workers by (pool, state), the nameless among them; `gauges`: everything in use;
    `told_s`: since the controller last told who is there, None where nobody tells; `desired`: programs it wants by
    role, empty where that is not known."""

    ready: bool = False
    members: int = 0
    told_s: float | None = None
    desired: Mapping[Role, int] = field(default_factory=dict)
    states: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gauges: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    prefix_index: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[WorkerFigures, ...] = ()


def pairs_json(status: Status) -> list[dict[str, object]]:
    """What a decode worker told of its pairs, for people (JSON-able)."""
    return [
        {
            "prefill": pair.prefill,
            "jobs_sent": pair.jobs_sent,
            "jobs": dict(pair.jobs),
            "kv_bytes": pair.kv_bytes,
            "slots_set_aside": pair.slots_set_aside,
            "seconds": pair_seconds(pair),
        }
        for pair in status.pairs
    ]


def pair_seconds(pair: Pair) -> dict[str, float]:
    """Where the time of its hand-offs went, by part."""
    return {
        "offer_wait": pair.offer_wait_s,
        "wire": pair.wire_s,
        "verify": pair.verify_s,
        "publish": pair.publish_s,
        "exposed": pair.exposed_s,
    }
