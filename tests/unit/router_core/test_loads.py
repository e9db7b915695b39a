"""What is left of a worker's queue between two of its statuses, and when a booking counts no more."""

import pytest

from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import PrefillRate, Rates, Status
from router.loads import Report, advance, queue_now
from tests.unit.router_core.fakes import request
from tests.unit.router_core.world import World, world

KNOWN = Rates(prefill=[PrefillRate(depth=4096, tokens_per_s=1000.0)])


def report(*queue: int, ended: int = 0, rates: Rates = KNOWN) -> Report:
    return Report(Status(queue=queue, rates=rates), at=10.0, ended=ended)


@pytest.mark.parametrize(
    ("told", "fresh", "now", "left"),
    [
        (report(100, 900), [], 10.0, (100, 900)),
        (report(100, 900), [], 10.05, (50, 900)),
        (report(100, 900), [], 10.4, (600,)),
        (report(100, 900), [], 12.0, ()),
        (report(100, 900, ended=1), [], 10.05, (900,)),
        (report(100, 900, ended=1), [], 10.4, (600,)),
        (report(100, 900, ended=2), [], 10.0, ()),
        (report(100), [(500, 10.0)], 10.05, (50, 500)),
        (report(100), [(500, 10.0)], 10.3, (300,)),
        (report(), [(500, 20.0), (700, 20.0)], 20.25, (250, 700)),
        (report(100, rates=Rates()), [(500, 10.0)], 11.0, (100, 500)),
    ],
)
def test_work_goes_on_between_two_statuses(
    told: Report, fresh: list[tuple[int, float]], now: float, left: tuple[int, ...]
) -> None:
    assert queue_now(told, fresh, now, alone=True) == left


def test_on_a_decode_worker_only_what_was_seen_to_end_is_gone() -> None:
    assert queue_now(report(100, 900), [(50, 10.0)], 12.0, alone=False) == (100, 900, 50)
    assert queue_now(report(100, 900, ended=1), [], 12.0, alone=False) == (900,)


def test_the_shortest_prompt_is_read_first() -> None:
    assert advance((900, 100, 300), 250) == ([150, 900], 0.0)
    assert advance((10,), 30) == ([], 20)


def queued(made: World, name: str) -> int:
    view = made.core._workers.by_address[f"{name}:1"]
    return view.load(made.now).queued_tokens


def test_a_booking_on_prefill_ends_when_the_prompt_is_computed_and_on_decode_with_the_request() -> None:
    """P03: load is not released when headers arrive, nor kept when the work is done."""
    made = world(prefill=1, decode=1)
    made.ask(request("r", prompt=tuple(range(100)), max_tokens=20))
    assert (queued(made, "p0"), queued(made, "d0")) == (100, 0)
    made.deliver()
    assert queued(made, "p0") == 100
    made.apply(made.core.on_session("d0:1", pb.FromDecode(handed_off=pb.HandedOff(attempt="r.1")), made.now))
    assert queued(made, "p0") == 0
    decode = made.core._workers.by_address["d0:1"]
    assert decode.load(made.now).active == 1
    made.run()
    assert decode.load(made.now).active == 0


def test_a_prompt_that_decode_has_read_is_queued_there_no_more() -> None:
    made = world(prefill=0, decode=1)
    made.ask(request("r", prompt=tuple(range(100)), max_tokens=20))
    assert queued(made, "d0") == 100
    made.deliver()
    made.workers["d0:1"].step()
    made.deliver()
    assert queued(made, "d0") == 0
    assert made.core.gauges()["bookings"] == 1
