"""A session that breaks between living peers, and one whose worker is gone: the router's side (DESIGN §6)."""

from tests.unit.router_core.fakes import FakeWorker, expected, request
from tests.unit.router_core.world import Client, World, states, submits, world


def broken_off() -> tuple[World, FakeWorker, Client]:
    """A request whose session breaks after some tokens, some of which are lost on the way."""
    made = world(decode=2)
    client = made.ask(request("r", (10, 20, 8), max_tokens=40))
    victim = next(w for w in made.workers.values() if submits(w))
    made.deliver()
    victim.step()
    made.deliver()
    victim.step()
    made.hang_up(victim.address)
    assert client.ids[0]
    return made, victim, client


def test_a_broken_session_goes_on_where_it_was() -> None:
    made, victim, client = broken_off()
    assert states(made)[victim.address] == "connecting"
    known = len(client.ids[0])
    victim.step()
    made.connect()
    (resumed,) = victim.received[-1].hello.attempts
    assert (resumed.attempt, list(resumed.next_offsets)) == ("r.1", [known])
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert (client.trace.attempts, client.trace.decode_worker) == (1, victim.name)
    assert made.core.counters()["sessions_broken"] == 1
    assert made.idle()


def test_what_was_cancelled_or_stopped_while_the_session_was_broken_is_said_in_the_next_hello() -> None:
    made, victim, client = broken_off()
    other = made.ask(request("s"))
    made.cancel("r")
    made.connect()
    assert not victim.works
    assert not victim.received[-1].hello.attempts
    made.run()
    assert other.outcomes == [None]
    assert not client.outcomes
    assert made.idle()


def test_an_attempt_that_the_worker_does_not_know_any_more_fails_over() -> None:
    made, victim, client = broken_off()
    victim.works.clear()
    made.connect()
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert client.trace.attempts == 2
    assert made.idle()


def test_a_submit_that_was_lost_with_its_session_is_sent_again_and_nothing_has_failed() -> None:
    made = world()
    client = made.ask(request("r"))
    worker = made.workers["d0:1"]
    worker.works.clear()
    made.hang_up("d0:1")
    made.connect()
    made.run()
    assert client.outcomes == [None]
    counters = made.core.counters()
    assert counters["attempts_lost_on_the_way"] == 1
    assert "attempts_failed" not in counters


def test_a_session_that_does_not_come_back_is_given_up_while_the_watch_goes_on() -> None:
    made, victim, client = broken_off()
    made.advance(2.0, connect=False)
    assert not made.core.counters().get("attempts_failed")
    made.advance(1.0, connect=False)
    assert made.core.counters()["attempts_failed"] == 1
    made.run()
    assert client.trace.decode_worker != victim.name
    assert client.ids[0] == expected(client.request, 0)


def test_a_worker_whose_address_refuses_connections_is_lost_at_once() -> None:
    made, victim, client = broken_off()
    victim.up = False
    made.connect()
    assert not made.core.counters().get("attempts_failed"), "its watch is still up"
    made.close_watch(victim.address)
    made.connect()
    assert made.core.counters()["attempts_failed"] == 1
    made.run()
    assert client.ids[0] == expected(client.request, 0)


def test_a_worker_that_neither_answers_nor_refuses_is_lost_after_a_second() -> None:
    made, victim, _client = broken_off()
    made.close_watch(victim.address)
    made.advance(0.8, connect=False)
    assert not made.core.counters().get("attempts_failed")
    made.advance(0.4, connect=False)
    assert made.core.counters()["attempts_failed"] == 1
