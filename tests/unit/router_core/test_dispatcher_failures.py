"""The dispatcher's core, one failure at a time (DESIGN §6)."""

import random

import pytest

from cluster.core.errors import InvalidRequest, RequestFailed, Unavailable
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Blame
from router.effects import StreamClosed
from router.queue import SCAN
from tests.unit.router_core.fakes import FakeWorker, Faults, expected, request
from tests.unit.router_core.world import World, failure, said, states, submits, world


def test_a_lost_watch_event_opens_the_watch_again_and_disturbs_no_attempt() -> None:
    made = world()
    client = made.ask(request("r", max_tokens=9))
    made.watching["d0:1"] += 1
    made.heartbeat()
    assert made.core.counters()["watch_gaps"] == 1
    assert states(made)["d0:1"] == "connecting"
    made.run()
    assert client.outcomes == [None]
    assert client.trace.attempts == 1


def test_a_silent_worker_gets_no_new_work_and_loses_its_attempts_only_when_confirmed() -> None:
    made = world(decode=2)
    first = made.ask(request("a", max_tokens=9))
    victim = next(w for w in made.workers.values() if submits(w))
    victim.up = False
    for _ in range(13):
        said(made, victim.name, pb.FromDecode(hello=victim.identity()))  # its session talks, its watch does not
        made.advance()
    assert states(made)[victim.address] == "suspect"
    assert first.trace.attempts == 1
    made.ask(request("b"))
    assert len(submits(victim)) == 1
    for _ in range(13):
        made.advance()
    assert made.core.counters()["workers_silent"] == 1
    made.run()
    assert first.outcomes == [None]
    assert first.ids[0] == expected(first.request, 0)
    assert first.trace.attempts == 2


def test_a_router_that_was_frozen_blames_nobody() -> None:
    made = world()
    client = made.ask(request("r", max_tokens=9))
    made.advance()
    made.now += 60.0
    made.apply(made.core.tick(made.now))
    assert "workers_silent" not in made.core.counters()
    made.run()
    assert client.trace.attempts == 1


@pytest.mark.parametrize("first", ["tick", "watch"])
def test_nobodys_patience_runs_out_while_the_router_is_frozen(first: str) -> None:
    """Found by simulation: a router that woke gave up its requests at once, having "waited" all the time it slept."""
    made = world()
    client = made.ask(request("r", max_tokens=9))
    made.die("d0:1")
    for _ in range(4):
        made.advance()
    made.now += 60.0
    if first == "watch":
        made.apply(made.core.on_watch("p0:1", StreamClosed("keepalive"), made.now))
    made.apply(made.core.tick(made.now))
    assert not client.outcomes
    made.workers["d0:1"].restart()
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)


def test_another_epoch_on_the_same_address_is_another_peer() -> None:
    made = world()
    worker = made.workers["d0:1"]
    client = made.ask(request("r", max_tokens=9))
    made.apply(made.core.on_session("d0:1", pb.FromDecode(), made.now))
    worker.restart()
    made.close_watch("d0:1")
    made.connect()
    assert states(made)["d0:1"] == "ready"
    assert worker.received[-1].submit.attempt == "r.2"
    made.run()
    assert client.outcomes == [None]
    numbers = [m.hello.session for m in worker.received if m.HasField("hello")]
    assert numbers == [1, 2]


def test_a_worker_that_says_it_is_lost_is_believed() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    victim = next(w for w in made.workers.values() if submits(w))
    said(made, victim.name, pb.FromDecode(lost=pb.WorkerLost(reason="a plan is overdue")))
    assert states(made)[victim.address] == "lost"
    made.run()
    assert client.trace.decode_worker != victim.name


def test_a_worker_speaks_of_its_own_attempts_only() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    stranger = next(w for w in made.workers.values() if w.role == "decode" and not submits(w))
    run = pb.TokenRun(attempt="r.1", index=0, offset=0, ids=[999], end="eos")
    for message in (
        pb.FromDecode(tokens=pb.Tokens(runs=[run])),
        pb.FromDecode(failed=pb.AttemptFailed(attempt="r.1", reason="not mine", blame=Blame.BLAME_REQUEST)),
        pb.FromDecode(preempted=pb.Preempted(attempt="r.1")),
    ):
        said(made, stranger.name, message)
    assert made.core.counters() == {"late_messages": 3}
    assert not client.outcomes
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert client.trace.attempts == 1


def test_clients_errors_never_count_against_a_worker() -> None:
    made = world(decode=2)
    for number in range(20):
        client = made.ask(request(f"bad{number}"))
        name = next(w.name for w in made.workers.values() if f"bad{number}.1" in w.works)
        failed = pb.AttemptFailed(attempt=f"bad{number}.1", reason="odd token", blame=Blame.BLAME_REQUEST)
        made.workers[f"{name}:1"].works.clear()
        said(made, name, pb.FromDecode(failed=failed))
        assert isinstance(client.outcomes[0], InvalidRequest)
        assert client.trace.attempts <= 1
    for number in range(10):
        made.ask(request(f"good{number}", max_tokens=20))
    assert min(len(submits(made.workers[f"d{i}:1"])) for i in range(2)) >= 5


def test_what_a_worker_does_not_know_goes_on_at_another() -> None:
    """Not its fault, so it is as good as any for other requests; but this one was lost there."""
    workers = [FakeWorker("p0", "prefill"), *(FakeWorker(f"d{i}", "decode", epoch=10 + i) for i in range(2))]
    made = World(workers)
    made.connect()
    for number in range(8):
        made.ask(request(f"r{number}"))
        first = next(w for w in made.workers.values() if f"r{number}.1" in w.works)
        made.deliver()  # it had begun
        first.works.clear()
        said(made, first.name, pb.FromDecode(unknown=pb.UnknownAttempt(attempt=f"r{number}.1")))
        (second,) = [w for w in made.workers.values() if f"r{number}.2" in w.works]
        assert second is not first
        made.run()
    assert all(client.outcomes == [None] for client in made.clients.values())


def test_a_failing_worker_is_tried_less_and_comes_back() -> None:
    made = world(decode=2)
    bad = made.workers["d0:1"]
    bad.faults = Faults(fail=1.0)
    for number in range(200):
        assert made.ask(request(f"r{number}")).outcomes in ([], [None])
        made.run()
    assert len(submits(bad)) < 12
    assert all(client.outcomes == [None] for client in made.clients.values())
    bad.faults = Faults()
    for number in range(200, 500):
        made.ask(request(f"r{number}"))
        made.run()
    assert len(submits(bad)) > 80


def test_when_every_worker_fails_all_are_still_tried() -> None:
    made = world(decode=2, max_attempts=3)
    for worker in made.workers.values():
        worker.faults = Faults(fail=1.0)
    client = made.ask(request("r"))
    made.run()
    assert isinstance(client.outcomes[0], Unavailable)
    assert "3 attempts failed" in failure(client)
    assert all(submits(made.workers[f"d{i}:1"]) for i in range(2))


def test_after_the_first_token_a_failure_is_said_honestly() -> None:
    made = world(max_attempts=1)
    client = made.ask(request("r", max_tokens=9))
    made.workers["d0:1"].step()
    made.deliver()
    assert client.ids[0]
    made.workers["d0:1"].faults = Faults(fail=1.0)
    made.run()
    assert isinstance(client.outcomes[0], RequestFailed)


def test_with_no_worker_left_everybody_who_waits_is_told() -> None:
    made = world()
    made.die("d0:1")
    clients = [made.ask(request(f"r{number}")) for number in range(SCAN + 4)]
    for _ in range(25):
        made.advance()
    assert not any(client.outcomes for client in clients)
    for _ in range(4):
        made.advance()
    assert all(isinstance(client.outcomes[0], Unavailable) for client in clients)


def test_a_worker_that_comes_back_in_time_serves_who_waited() -> None:
    made = world()
    client = made.ask(request("r", max_tokens=9))
    made.workers["d0:1"].step()
    made.deliver()
    made.die("d0:1")
    for _ in range(20):
        made.advance()
    made.workers["d0:1"].restart()
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)


def test_other_weights_never_continue_a_stream() -> None:
    made = world(prefill=0)
    client = made.ask(request("r", max_tokens=9))
    made.workers["d0:1"].step()
    made.deliver()
    made.die("d0:1")
    made.workers["d0:1"].fingerprint = b"other"
    made.workers["d0:1"].restart()
    made.run()
    assert isinstance(client.outcomes[0], RequestFailed)
    assert "weights" in failure(client)


def test_preempted_work_goes_first_and_twice_preempted_work_reserves_everything() -> None:
    made = world()
    worker = made.workers["d0:1"]
    made.ask(request("a", prompt=(1,) * 150, max_tokens=100))
    made.ask(request("b", prompt=(1,) * 150, max_tokens=100))
    assert [s.attempt for s in submits(worker)] == ["a.1"]
    for attempt in ("a.1", "a.2"):
        worker.works.clear()
        said(made, "d0", pb.FromDecode(preempted=pb.Preempted(attempt=attempt)))
        made.heartbeat()
    assert [(s.attempt, s.preemptions) for s in submits(worker)] == [("a.1", 0), ("a.2", 1), ("a.3", 2)]
    made.run()
    assert all(client.outcomes == [None] for client in made.clients.values())


def test_twice_preempted_work_waits_until_its_worst_case_fits() -> None:
    """With fewer free blocks than it may ever want, but enough to begin, it went again once, and goes no more."""
    made = world()
    worker = made.workers["d0:1"]
    client = made.ask(request("a", prompt=(1,) * 150, max_tokens=100))
    whole, worker.blocks = worker.blocks, 60
    for attempt in ("a.1", "a.2"):
        worker.works.clear()
        said(made, "d0", pb.FromDecode(preempted=pb.Preempted(attempt=attempt)))
        for _ in range(3):
            made.heartbeat()
    assert [s.attempt for s in submits(worker)] == ["a.1", "a.2"]
    assert made.core.gauges()["queued"] == 1
    worker.blocks = whole
    made.heartbeat()
    assert [s.attempt for s in submits(worker)] == ["a.1", "a.2", "a.3"]
    made.run()
    assert client.outcomes == [None]


def test_a_draining_worker_gets_nothing_new_and_what_it_hands_over_goes_first_and_unpunished() -> None:
    made = world(decode=2, max_attempts=1)
    clients = [made.ask(request(name, prompt=(1,) * 20, max_tokens=40)) for name in "abcd"]
    made.advance()
    leaver = next(worker for worker in made.workers.values() if submits(worker))
    other = made.workers["d1:1" if leaver.name == "d0" else "d0:1"]
    given = sorted(leaver.works)
    assert given
    assert other.works
    leaver.draining = other.draining = True
    made.heartbeat()
    assert states(made)[leaver.address] == "draining"
    clients.append(made.ask(request("e", prompt=(1,) * 20, max_tokens=40)))
    for attempt in given * 2:  # said again it is late, and changes nothing
        leaver.works.pop(attempt, None)
        said(made, leaver.name, pb.FromDecode(preempted=pb.Preempted(attempt=attempt, draining=True)))
    before = len(submits(other))
    made.die(leaver.address)  # it has left, and nothing was on it
    other.draining = False
    made.heartbeat()
    went_on = submits(other)[before:]
    assert [s.attempt for s in went_on] == [f"{attempt[0]}.2" for attempt in given] + ["e.1"]
    assert all(s.preemptions == 0 and s.samples[0].emitted for s in went_on[:-1])
    made.run()
    for client in clients:
        assert client.outcomes == [None]
        assert client.ids[0] == expected(client.request, 0)
    assert made.core.counters()["attempts_handed_over"] == len(given)
    assert {"attempts_failed", "attempts_preempted"}.isdisjoint(made.core.counters())


def test_a_prefill_worker_that_restarts_or_leaves_frees_its_bookings() -> None:
    made = world(prefill=2)
    made.ask(request("r", prompt=(1,) * 100, max_tokens=50))
    made.deliver()
    assert made.core.gauges()["bookings"] == 2
    worker = made.workers["d0:1"]
    first = submits(worker)[0].prefill[0].address
    made.workers[first].restart()
    made.close_watch(first)
    made.connect()
    assert made.core.gauges()["bookings"] == 1
    made.apply(made.core.set_members(["d0:1"], made.now))
    assert made.core.gauges()["bookings"] == 1
    made.run()
    assert made.idle()


def test_outcomes_add_up() -> None:
    made = world(decode=2, max_attempts=2)
    rng = random.Random(3)
    for worker in made.workers.values():
        worker.faults = Faults(fail=0.1, preempt=0.1, refuse=0.2)
    for number in range(100):
        made.ask(request(f"r{number}", max_tokens=9))
        if rng.random() < 0.1:
            made.cancel(f"r{number}")
        made.advance()
    made.run()
    counters = made.core.counters()
    assert sum(v for k, v in counters.items() if k.startswith("outcome_")) == 100
    assert counters["outcome_cancelled"] == sum(c.cancelled for c in made.clients.values())
    assert made.idle()


def test_a_wave_of_failovers_goes_first_but_not_all_at_once() -> None:
    made = world(decode=2, failovers_at_once=2)
    clients = [made.ask(request(name, prompt=(1,) * 6, max_tokens=12)) for name in "abcdef"]
    made.advance()
    dead, other = (made.workers[address] for address in ("d0:1", "d1:1"))
    lost = [s.attempt.split(".")[0] for s in submits(dead)]
    assert len(lost) > 2, "too few to make a wave"
    before = len(submits(other))
    made.die("d0:1")
    made.connect()
    clients.append(made.ask(request("new", prompt=(2,) * 6, max_tokens=12)))
    assert [s.attempt for s in submits(other)[before:]] == [f"{lost[0]}.2", f"{lost[1]}.2", "new.1"]
    other.step()  # both go on
    made.deliver()
    assert [s.attempt for s in submits(other)[before + 3 :]] == [f"{name}.2" for name in lost[2:4]]
    made.run()
    assert all(client.outcomes == [None] and client.ids == [expected(client.request, 0)] for client in clients)
    assert not any(made.core.gauges().values())
