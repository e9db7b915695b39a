"""Ways in which other split servers' routers fail, tried on the dispatcher's core (docs/faults.md)."""

import pytest

from cluster.core.keys import KeyChain, root_key
from router import drain
from tests.fakes.books import weight
from tests.unit.router_core.fakes import BLOCK, Faults, expected, request
from tests.unit.router_core.world import submits, world


def test_a_burst_of_many_times_what_fits_is_served_in_turn_and_nothing_counts_as_a_failure() -> None:
    """R15: waiting for a place is no sign of a worker's health, and costs no attempt."""
    made = world()
    made.workers["d0:1"].blocks = 12
    made.heartbeat()
    clients = [made.ask(request(f"r{number}", prompt=(number,) * 4, max_tokens=5)) for number in range(32)]
    assert len(submits(made.workers["d0:1"])) < 8, "the others wait here"
    made.run()
    assert all(client.outcomes == [None] and client.trace.attempts == 1 for client in clients)
    assert not {"attempts_failed", "workers_silent"} & {k for k, v in made.core.counters().items() if v}
    assert made.idle()


def test_while_every_prefill_worker_refuses_requests_end_and_bookings_return_to_zero() -> None:
    """F12: other prefill workers first, then decode alone, for one request per decode worker at a time."""
    made = world(prefill=3, decode=2)
    for worker in made.workers.values():
        worker.faults, worker.blocks = Faults(no_prefill=1.0), 1000
    made.heartbeat()
    clients = [made.ask(request(f"r{number}", prompt=(number,) * 100, max_tokens=9)) for number in range(6)]
    for _ in range(200):
        made.advance(0.1)
        alone = [work for w in made.workers.values() for work in w.works.values() if not work.submit.prefill]
        assert len(alone) <= 2
    for client in clients:
        assert client.outcomes == [None]
        assert client.ids[0] == expected(client.request, 0)
        assert client.trace.prefill_worker == "local"
    assert made.core.gauges()["bookings"] == 0
    assert made.idle()


def test_a_router_that_has_just_begun_knows_what_workers_cache() -> None:
    """F07: a watch begins with all the worker's keys, so a restart forgets nothing."""
    prompt = tuple(range(100))
    keys = b"".join(KeyChain(root_key(b"weights"), BLOCK).extend(prompt))
    for cached in range(3):
        made = world(prefill=3)
        address = f"p{cached}:1"
        made.close_watch(address)
        for event in made.workers[address].hello(keys):
            made.apply(made.core.on_watch(address, event, made.now))
        made.watching[address] = 4
        made.ask(request("a", prompt=prompt, max_tokens=4))
        assert submits(made.workers["d0:1"])[-1].prefill[0].worker == f"p{cached}"


def test_no_book_of_a_router_grows_with_the_requests_it_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: whatever is keyed by a request goes with it, but for the newest of those that are over (test_records.py)."""
    monkeypatch.setattr(drain, "_REMEMBERED", 16)  # departures that the pace is known by: full soon
    made = world(prefill=2, decode=2, debug_requests=0)
    for worker in made.workers.values():
        worker.faults = Faults(fail=0.05, preempt=0.05, refuse=0.1, no_prefill=0.1)

    def serve(first: int, count: int) -> int:
        for number in range(first, first + count):
            made.ask(request(f"r{number}", prompt=(number % 50,) * 20, max_tokens=9))
            if number % 10 == 0:
                made.cancel(f"r{number}")
            made.run()
            made.clients.clear()
        for worker in made.workers.values():
            worker.received.clear()
        assert made.idle()
        return weight(made.core)

    before = serve(0, 300)
    assert before > 50
    assert serve(300, 300) <= before
