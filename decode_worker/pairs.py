"""What hand-offs from each prefill worker came to since this worker began: jobs by their end, bytes, where time went.

Rows go by the worker's name, so they outlive its lives; routers are told of those that live now (proto/watch.proto).
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from cluster.core.handoff_ends import JobEnd
from cluster.stubs import watch_pb2

MOST = 1024  # rows kept: more names than a cluster has workers at the same time


@dataclass(slots=True, eq=False)
class Pair:
    """Sums over the jobs given to one prefill worker, in seconds; a job ends in exactly one way."""

    sent: int = 0
    jobs: Counter[JobEnd] = field(default_factory=Counter)
    kv_bytes: int = 0
    offer_wait: float = 0.0
    wire: float = 0.0
    verify: float = 0.0
    publish: float = 0.0
    exposed: float = 0.0


class Pairs:
    """The rows of one decode worker."""

    def __init__(self) -> None:
        self.rows: OrderedDict[str, Pair] = OrderedDict()  # last used last

    def of(self, prefill: str) -> Pair:
        """The row of this prefill worker; the one that was not used for longest goes when there are too many."""
        pair = self.rows.setdefault(prefill, Pair())
        self.rows.move_to_end(prefill)
        if len(self.rows) > MOST:
            self.rows.popitem(last=False)
        return pair

    def told(self, living: Container[str], set_aside: Mapping[str, int]) -> list[watch_pb2.Pair]:
        """The rows of those who live. `set_aside`: slots by name."""
        return [
            watch_pb2.Pair(
                prefill=name,
                jobs_sent=pair.sent,
                jobs={how: count for how, count in pair.jobs.items()},
                kv_bytes=pair.kv_bytes,
                offer_wait_s=pair.offer_wait,
                wire_s=pair.wire,
                verify_s=pair.verify,
                publish_s=pair.publish,
                exposed_s=pair.exposed,
                slots_set_aside=set_aside.get(name, 0),
            )
            for name, pair in self.rows.items()
            if name in living
        ]
