"""How much a worker has to compute now, from a status that is up to half a second old. Pure.

Work goes on between two statuses: at 20,000 positions a second 5,000 are gone before the average status is looked at,
a whole prompt. So the reported queue is taken to have moved on since:

1. the engine reads the shortest prompt first, at the rate it measured;
2. what this router has seen end since is gone, whatever the rate says, and what it has not seen end is still there;
3. then come the prompts that this router has booked and no status shows yet, each from the moment it was sent.
On a decode worker streams run between the chunks and the rate says little: there 1 does not hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.stubs.watch_pb2 import Status
from router.placement import Rates, Snapshot, WorkerLoad, read_rates


@dataclass(slots=True)
class Report:
    """A worker's last status, and when it came. `ended`: reported prompts known to be read since.

    A worker may tell nonsense: what is reckoned with is read here, once, and less than nothing counts as nothing.
    """

    status: Status
    at: float
    ended: int = 0
    rates: Rates = field(init=False)
    queue: tuple[int, ...] = field(init=False)
    active: int = field(init=False)  # sequences that it runs, or is about to
    context: int = field(init=False)

    def __post_init__(self) -> None:
        told = self.status
        self.rates = read_rates(told.rates)
        self.queue = tuple(positions for positions in told.queue if positions > 0)
        self.active = sum(max(0, count) for count in (told.running, told.waiting, told.handing_off))
        self.context = max(0, told.context_tokens)


def queue_now(report: Report, booked: Sequence[tuple[int, float, bool]], now: float, *, alone: bool) -> tuple[int, ...]:
    """Positions left, by prompt. `booked`: (positions, when sent, reported) of each prompt of ours not yet read.

    `alone`: nothing but prompts runs there.
    """
    queue, rates = report.queue, report.rates
    rate = rates.tokens_per_s if alone and rates.prefill else 0.0
    left, unused = advance(queue, rate * max(0.0, now - report.at))
    left = left[max(0, report.ended - (len(queue) - len(left))) :]
    sent = [tokens for tokens, _, reported in booked if not reported]
    left = _at_least(left, len(booked) - len(sent), rates.chunk_tokens)
    if sent and not left and rate:
        waited = now - min(at for _, at, reported in booked if not reported)
        fresh = len(sent)
        sent, _ = advance(sent, min(unused, rate * max(0.0, waited)))
        sent = _at_least(sent, fresh, rates.chunk_tokens)
    return (*left, *sent)


def _at_least(left: list[int], prompts: int, chunk: int) -> list[int]:
    return [chunk] * (prompts - len(left)) + left


def advance(queue: Sequence[int], positions: float) -> tuple[list[int], float]:
    """What is left of the queue after so many positions, shortest prompt first; and how many were not needed."""
    left = sorted(queue)
    while left and positions >= left[0]:
        positions -= left.pop(0)
    if left:
        left[0] -= int(positions)
        positions = 0.0
    return left, positions


def lend(decode: Sequence[WorkerLoad], prefill: Sequence[WorkerLoad]) -> Snapshot:
    """A worker that has measured nothing yet is taken to be as fast as the others, or it would never be tried.

    Prompts: as the fastest of its pool, then of the other. Steps: as the first decode worker that knows.
    """
    fastest = {
        "decode": _fastest(decode) or _fastest(prefill),
        "prefill": _fastest(prefill) or _fastest(decode),
    }
    steps = next((d.rates.steps for d in decode if d.rates.steps), ())

    def lent(load: WorkerLoad, pool: str) -> WorkerLoad:
        rates = load.rates
        if not rates.prefill and fastest[pool]:
            rates = replace(rates, prefill=fastest[pool])
        if pool == "decode" and not rates.steps and steps:
            rates = replace(rates, steps=steps)
        return load if rates is load.rates else replace(load, rates=rates)

    return Snapshot(tuple(lent(d, "decode") for d in decode), tuple(lent(p, "prefill") for p in prefill))


def _fastest(loads: Sequence[WorkerLoad]) -> tuple[tuple[int, float], ...]:
    measured = [load.rates for load in loads if load.rates.prefill]
    return max(measured, key=lambda rates: rates.tokens_per_s).prefill if measured else ()
