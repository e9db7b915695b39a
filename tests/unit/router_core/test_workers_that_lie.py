"""What a worker tells of itself may be nonsense: the router places by what is left of it, and nobody gains by it."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from cluster.stubs.watch_pb2 import LinkRate, PrefillRate, Rates, Status, StepTime, WatchEvent
from router.loads import Report
from router.placement import Rates as RouterRates
from router.placement import read_rates
from tests.unit.router_core.fakes import request
from tests.unit.router_core.world import World, world

NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, -5e-324, 1.7e308)
RATES: dict[str, Callable[[float], Rates]] = {
    "prefill": lambda value: Rates(prefill=[PrefillRate(depth=1024, tokens_per_s=value)]),
    "step": lambda value: Rates(steps=[StepTime(batch=1, context_tokens=64, seconds=value)]),
    "link": lambda value: Rates(links=[LinkRate(epoch=1, gb_per_s=value)]),
}
NEGATIVE = {
    "chunks": Rates(chunk_tokens=-5, local_chunk_tokens=-3),
    "a step of fewer than no streams": Rates(steps=[StepTime(batch=-32, context_tokens=0, seconds=1.0)]),
    "a step of fewer than no positions": Rates(steps=[StepTime(batch=1, context_tokens=-(2**62), seconds=1.0)]),
}
SAID = {f"{name} {value}": make(value) for name, make in RATES.items() for value in NUMBERS} | NEGATIVE


def tell(made: World, address: str, **changes: Any) -> None:
    """A status of this worker, changed."""
    status = made.workers[address].status()
    status.MergeFrom(Status(**changes))
    sequence = made.watching[address]
    made.watching[address] = sequence + 1
    made.apply(made.core.on_watch(address, WatchEvent(sequence=sequence, status=status), made.now))


@pytest.mark.parametrize("kind", SAID)
def test_rates_that_cannot_be_are_not_measured_ones(kind: str) -> None:
    assert read_rates(SAID[kind]) == RouterRates()
    made = world(prefill=2, decode=2)
    for address in made.workers:
        tell(made, address, rates=SAID[kind])
    for name, length in (("short", 3), ("long", 100)):
        made.ask(request(name, tuple(range(length))))
    made.run()
    assert [client.outcomes for client in made.clients.values()] == [[None], [None]]


@pytest.mark.parametrize(
    "less",
    [
        {"queue": [-5, -(2**31)]},
        {"running": -(2**31)},
        {"waiting": -9},
        {"handing_off": -9},
        {"context_tokens": -(2**63)},
    ],
)
def test_less_than_nothing_is_nothing_and_attracts_nobody(less: dict[str, Any]) -> None:
    report = Report(Status(**less), at=0.0)
    assert (report.queue, report.active, report.context) == ((), 0, 0)
    made = world(prefill=2, decode=2)
    for address in ("p0:1", "d0:1"):
        tell(made, address, **less)
    for number in range(40):
        made.ask(request(f"r{number}", tuple(range(number, number + 100)), max_tokens=1))
        made.run()
    assert {client.trace.decode_worker for client in made.clients.values()} == {"d0", "d1"}, "equal ones are drawn"
    assert {client.trace.prefill_worker for client in made.clients.values()} == {"p0", "p1"}


@pytest.mark.parametrize("size", [0, -4])
@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_size"])
def test_a_worker_whose_sizes_cannot_be_gets_nothing(name: str, size: int) -> None:
    made = world(prefill=1, decode=2)
    made.close_watch("d0:1")
    events = made.workers["d0:1"].hello()
    setattr(events[0].hello.identity.layout, name, size)
    made.watching["d0:1"] = 4
    for event in events:
        made.apply(made.core.on_watch("d0:1", event, made.now))
    for number in range(9):
        made.ask(request(f"r{number}"))
        made.run()
    assert {client.trace.decode_worker for client in made.clients.values()} == {"d1"}
    assert {row.worker: row.state for row in made.core.figures(made.now).workers}["d0"] == "mismatch"
    assert f"mismatch: {name} {size}" in str(made.core.status(made.now)["workers"])
