"""How much a worker has to compute now, from a status that is up to half a second old. Pure.

Work goes on between two statuses: at 20,000 positions a second 5,000 are gone before the average status is looked at,
a whole prompt. So the reported queue is taken to have moved on since:

1. the engine reads the shortest prompt first, at the rate it measured;
2. what this router has seen end since is gone, whatever the rate says;
3. then come the prompts that this router has booked and no status shows yet, each from the moment it was sent.
On a decode worker streams run between the chunks and the rate says little: there only 2 holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.stubs.watch_pb2 import Status
from router.placement import Rates, read_rates


@dataclass(slots=True)
class Report:
    """A worker's last status, and when it came. `ended`: reported prompts known to be read since."""

    status: Status
    at: float
    ended: int = 0
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = read_rates(self.status.rates)


def queue_now(report: Report, fresh: Sequence[tuple[int, float]], now: float, *, alone: bool) -> tuple[int, ...]:
    """Positions left, by prompt. `fresh`: (positions, when sent) not yet reported; `alone`: only prompts run."""
    queue = list(report.status.queue)
    rate = report.rates.tokens_per_s if alone and report.rates.prefill else 0.0
    left, unused = advance(queue, rate * max(0.0, now - report.at))
    left = left[max(0, report.ended - (len(queue) - len(left))) :]
    sent = [tokens for tokens, _ in fresh]
    if sent and not left and rate:
        waited = now - min(at for _, at in fresh)
        sent, _ = advance(sent, min(unused, rate * max(0.0, waited)))
    return (*left, *sent)


def advance(queue: Sequence[int], positions: float) -> tuple[list[int], float]:
    """What is left of the queue after so many positions, shortest prompt first; and how many were not needed."""
    left = sorted(queue)
    while left and positions >= left[0]:
        positions -= left.pop(0)
    if left:
        left[0] -= int(positions)
        positions = 0.0
    return left, positions
