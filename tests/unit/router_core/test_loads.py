"""What is left of a worker's queue between two of its statuses, and when a booking counts no more."""

from dataclasses import replace

import pytest

from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import PrefillRate, Rates, Status
from router.loads import Report, advance, lend, queue_now
from router.placement import Rates as RouterRates
from router.placement import StepCell
from tests.unit.router_core.fakes import request
from tests.unit.router_core.test_router_placement import worker
from tests.unit.router_core.world import World, world

KNOWN = Rates(prefill=[PrefillRate(depth=4096, tokens_per_s=1000.0)])


def report(*queue: int, ended: int = 0, rates: Rates = KNOWN) -> Report:
    return Report(Status(queue=queue, rates=rates), at=10.0, ended=ended)


@pytest.mark.parametrize(
    ("told", "booked", "now", "left"),
    [
        (report(100, 900), [], 10.0, (100, 900)),
        (report(100, 900), [], 10.05, (50, 900)),
        (report(100, 900), [], 10.4, (600,)),
        (report(100, 900), [], 12.0, ()),
        (report(100, 900, ended=1), [], 10.05, (900,)),
        (report(100, 900, ended=1), [], 10.4, (600,)),
        (report(100, 900, ended=2), [], 10.0, ()),
        (report(100), [(500, 10.0, False)], 10.05, (50, 500)),
        (report(100), [(500, 10.0, False)], 10.3, (300,)),
        (report(), [(500, 20.0, False), (700, 20.0, False)], 20.25, (250, 700)),
        (report(100, 900), [(100, 9.0, True), (900, 9.0, True)], 10.5, (256, 500)),
        (report(100, 900), [(900, 9.0, True)], 12.0, (256,)),
        (report(), [(500, 20.0, False)], 25.0, (256,)),
        (report(100, rates=Rates()), [(500, 10.0, False)], 11.0, (100, 500)),
    ],
)
def test_work_goes_on_between_two_statuses(
    told: Report, booked: list[tuple[int, float, bool]], now: float, left: tuple[int, ...]
) -> None:
    assert queue_now(told, booked, now, alone=True) == left


def test_on_a_decode_worker_only_what_was_seen_to_end_is_gone() -> None:
    assert queue_now(report(100, 900), [(50, 10.0, False)], 12.0, alone=False) == (100, 900, 50)
    assert queue_now(report(100, 900, ended=1), [], 12.0, alone=False) == (900,)


def test_the_shortest_prompt_is_read_first() -> None:
    assert advance((900, 100, 300), 250) == ([150, 900], 0.0)
    assert advance((10,), 30) == ([], 20)


def test_a_worker_that_has_measured_nothing_is_taken_to_be_as_fast_as_the_others() -> None:
    """Otherwise it would be slower on paper than any that has worked, get no work, and never measure."""
    slow, fast = (RouterRates(prefill=((512, rate),)) for rate in (2000.0, 3000.0))
    steps = RouterRates(steps=(StepCell(1, 100, 5.0),))
    prefill = [replace(worker(f"p{i}"), rates=rates) for i, rates in enumerate((slow, fast, RouterRates()))]
    lent = lend([worker("d0"), worker("d1", rates=steps)], prefill)
    assert [p.rates.prefill for p in lent.prefill] == [slow.prefill, fast.prefill, fast.prefill]
    assert [(d.rates.prefill, d.rates.steps) for d in lent.decode] == [(fast.prefill, steps.steps)] * 2
    assert lend([worker("d0")], []).decode[0].rates == RouterRates()


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
