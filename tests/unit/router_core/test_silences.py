"""Workers that fall silent again and again: which of that counts against a request's attempts, and which does not."""

import pytest

from cluster.core.config import RouterSettings
from tests.unit.router_core.fakes import expected, length, request
from tests.unit.router_core.world import Client, World, failure, world

MOST = RouterSettings().max_attempts
PROMPT, TOKENS = (100, 99), 200


def asked(made: World, silences: int) -> Client:
    client = made.ask(request("long", prompt=PROMPT, max_tokens=TOKENS))
    assert length(list(PROMPT), 0, TOKENS) > 3 * 4 * (silences + 1), "too short to see so many"
    return client


def silent(made: World, *, stuck: bool = False) -> None:
    """Every decode worker runs for a while, and is then frozen for longer than a router waits.

    `stuck`: it takes what it is given, and is frozen before it does any of it.
    """
    for _ in range(4):
        made.now += 0.25
        made.connect()
        for worker in made.workers.values() if not stuck else ():
            worker.step()
        made.deliver()
        made.heartbeat()
        made.apply(made.core.tick(made.now))
    for worker in made.workers.values():
        worker.up = worker.role == "prefill"
    for _ in range(14):
        made.advance()
    for worker in made.workers.values():
        worker.up = True


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_outlives_any_number_of_silences_if_it_gets_on_in_between(workers: int) -> None:
    made = world(decode=workers)
    client = asked(made, 2 * MOST)
    for _ in range(2 * MOST):
        silent(made)
    assert client.outcomes == []
    assert made.core.counters()["attempts_failed"] == 2 * MOST
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert made.idle()


def test_a_request_that_silences_workers_before_it_gets_anything_is_bounded() -> None:
    """I8: it may be what freezes them."""
    made = world(decode=2)
    client = asked(made, 2 * MOST)
    for _ in range(2 * MOST):
        silent(made, stuck=True)
    assert client.ids == [[]]
    assert failure(client) == f"{MOST} attempts failed, the last one: worker is silent"


def test_so_is_one_that_gets_stuck_later() -> None:
    made = world(decode=2)
    client = asked(made, 2 * MOST)
    silent(made)
    got = list(client.ids[0])
    for _ in range(2 * MOST):
        silent(made, stuck=True)
    assert client.ids == [got]
    assert failure(client) == f"{MOST} attempts failed, the last one: worker is silent"


def test_a_request_that_ends_workers_is_bounded_however_far_it_gets() -> None:
    made = world(decode=2)
    client = asked(made, 2 * MOST)
    while not client.over:
        for _ in range(4):
            made.advance()
        at = next((w for w in made.workers.values() if w.works), None)
        if at is not None:
            made.die(at.address)
            for _ in range(5):  # its session might come back
                made.advance()
            at.restart()
    assert client.trace.attempts == MOST
    assert failure(client).startswith(f"{MOST} attempts failed")


def test_and_silences_between_its_deaths_do_not_hide_them() -> None:
    made = world(decode=2, max_attempts=2)
    client = asked(made, 2 * MOST)
    for death in (False, True, False, True):
        assert not client.over
        if not death:
            silent(made)
            continue
        made.advance()
        made.die(next(w.address for w in made.workers.values() if w.works))
        for _ in range(8):
            made.advance()
        for worker in made.workers.values():
            if not worker.up:
                worker.restart()
    assert failure(client).startswith("2 attempts failed")
