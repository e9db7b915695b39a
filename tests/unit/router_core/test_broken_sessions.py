"""A session that breaks between living peers, and one whose worker is gone: the router's side (DESIGN §6)."""

from cluster.stubs import session_pb2 as pb
from router.effects import StreamOpened
from tests.unit.router_core.fakes import FakeWorker, expected, request
from tests.unit.router_core.world import Client, World, cancels, said, states, submits, world


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


def test_patience_that_ends_after_the_hello_was_sent_cancels_what_the_hello_named() -> None:
    """The worker may have resumed it: nobody would read it to the end."""
    made, victim, _client = broken_off()
    made.advance(2.3, connect=False)
    made.sessions.add(victim.address)
    made.apply(made.core.on_session(victim.address, StreamOpened(), made.now))  # its answer is under way
    assert [a.attempt for a in victim.received[-1].hello.attempts] == ["r.1"]
    made.now += 0.5
    made.apply(made.core.tick(made.now))
    assert made.core.counters()["attempts_failed"] == 1
    assert cancels(victim) == ["r.1"]


def test_connections_that_break_again_and_again_are_nobodys_fault() -> None:
    """More often than max_attempts, and the request is served all the same."""
    made, victim, client = broken_off()
    for _ in range(6):
        made.hang_up(victim.address)
        for worker in made.workers.values():
            worker.works.clear()  # what it had is forgotten each time
            made.hang_up(worker.address)
        made.connect()
        made.advance(3.0)
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert client.trace.attempts > 4


def test_what_is_said_again_after_a_break_changes_no_figure() -> None:
    made = world()
    client = made.ask(request("r", (10, 20, 8), max_tokens=40))
    who = pb.PrefillOn(attempt="r.1", worker="p0")
    figures = pb.HandedOff(attempt="r.1", kv_bytes=100, cached_tokens=2)
    for _ in range(2):
        said(made, "d0", pb.FromDecode(prefill_on=who))
        said(made, "d0", pb.FromDecode(handed_off=figures))
        made.hang_up("d0:1")
        made.connect()
    made.run()
    assert (client.trace.kv_bytes, client.trace.cached_tokens) == (100, 2)
    assert made.idle()
