"""The dispatcher's core, one situation at a time."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestFailed, Unavailable
from cluster.core.keys import KeyChain, root_key
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import Removed, Stored, WatchEvent
from router.queue import SCAN
from tests.unit.router_core.fakes import BLOCK, Client, FakeWorker, Faults, World, expected, request


def world(prefill: int = 1, decode: int = 1, **settings: int) -> World:
    workers = [FakeWorker(f"p{i}", "prefill") for i in range(prefill)]
    made = World([*workers, *(FakeWorker(f"d{i}", "decode") for i in range(decode))], **settings)
    made.connect()
    return made


def submits(worker: FakeWorker) -> list[pb.Submit]:
    return [message.submit for message in worker.received if message.HasField("submit")]


def cancels(worker: FakeWorker) -> list[str]:
    return [message.cancel.attempt for message in worker.received if message.HasField("cancel")]


def said(made: World, name: str, message: pb.FromDecode) -> None:
    """A decode worker says something."""
    made.apply(made.core.on_session(f"{name}:1", message, made.now))


def states(made: World) -> dict[str, str]:
    rows = made.core.status(made.now)["workers"]
    assert isinstance(rows, list)
    return {row["address"]: row["state"] for row in rows}


def failure(client: Client) -> str:
    """The message of the one error a client got."""
    assert len(client.outcomes) == 1
    return str(client.outcomes[0])


def test_one_request_from_end_to_end() -> None:
    made = world()
    client = made.ask(request("r", max_tokens=9))
    submit = submits(made.workers["d0:1"])[0]
    assert [(w.worker, w.address) for w in submit.prefill] == [("p0", "p0:1")]
    assert (submit.local_max_tokens, submit.attempt) == (64, "r.1")
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    trace = client.trace
    assert (trace.decode_worker, trace.prefill_worker, trace.attempts) == ("d0", "p0", 1)
    assert made.workers["d0:1"].received[-1].ended.attempt == "r.1"
    assert made.idle()


def test_everything_about_a_worker_comes_from_its_live_hello() -> None:
    made = World([FakeWorker("d0", "decode")])
    assert states(made) == {"d0:1": "connecting"}
    with pytest.raises(Unavailable):
        made.core.limits(made.now)
    for event in made.workers["d0:1"].hello():
        made.apply(made.core.on_watch("d0:1", event, made.now))
    assert states(made) == {"d0:1": "connecting"}
    made.watching["d0:1"] = 4
    made.connect()
    assert states(made) == {"d0:1": "ready"}
    limits = made.core.limits(made.now)
    assert (limits.max_context, limits.pool_tokens, limits.block_size) == (256, 64 * BLOCK, BLOCK)
    assert (limits.vocab_size, limits.eos_ids) == (1009, (2,))


def test_the_status_is_json_and_names_states_and_gauges() -> None:
    made = world()
    made.ask(request("r"))
    status = json.loads(json.dumps(made.core.status(made.now)))
    assert status["gauges"] == {"requests": 1, "queued": 0, "attempts": 1, "bookings": 1}
    assert [w["state"] for w in status["workers"]] == ["ready", "ready"]
    assert status["workers"][0]["epoch"] == f"{1:016x}"


def test_without_prefill_workers_decode_does_the_prompt() -> None:
    made = world(prefill=0)
    client = made.ask(request("r", prompt=tuple(range(200)), max_tokens=5))
    assert not submits(made.workers["d0:1"])[0].prefill
    made.run()
    assert client.outcomes == [None]


def test_when_nothing_pairs_the_mismatch_is_named() -> None:
    made = World([FakeWorker("p0", "prefill", fingerprint=b"new"), FakeWorker("d0", "decode", fingerprint=b"old")])
    made.connect()
    client = made.ask(request("r"))
    assert isinstance(client.outcomes[0], Unavailable)
    assert f"fingerprint ({b'new'.hex()} and {b'old'.hex()})" in failure(client)
    with pytest.raises(Unavailable, match="fingerprint"):
        made.core.limits(made.now)
    assert all(state.startswith("mismatch: prefill p0") for state in states(made).values())


def test_only_equal_shapes_are_paired() -> None:
    made = World(
        [
            FakeWorker("p0", "prefill", fingerprint=b"b"),
            FakeWorker("d0", "decode", fingerprint=b"a"),
            FakeWorker("d1", "decode", fingerprint=b"b"),
        ]
    )
    made.connect()
    for number in range(4):
        made.ask(request(f"r{number}"))
    assert len(submits(made.workers["d1:1"])) == 4


def test_requests_wait_until_there_is_room_and_keep_their_order() -> None:
    made = world()
    made.workers["d0:1"].blocks = 4
    made.heartbeat()
    clients = [made.ask(request(name, prompt=(1,) * 9, max_tokens=4)) for name in "abc"]
    assert [s.attempt for s in submits(made.workers["d0:1"])] == ["a.1"]
    made.run()
    assert [s.attempt for s in submits(made.workers["d0:1"])] == ["a.1", "b.1", "c.1"]
    assert all(client.outcomes == [None] for client in clients)


def test_a_full_queue_refuses_and_a_leaving_client_frees_its_place() -> None:
    made = world(decode=0, queue_limit=2)
    made.ask(request("a"))
    made.ask(request("b"))
    with pytest.raises(Overloaded):
        made.core.add_request(request("c"), made.now)
    made.cancel("a")
    made.ask(request("d"))
    assert made.core.counters()["outcome_overloaded"] == 1


def test_bookings_spread_a_burst_before_any_status_comes() -> None:
    made = world(prefill=2, decode=2, local_max_tokens=0)
    for number in range(8):
        made.ask(request(f"r{number}", prompt=tuple(range(28)), max_tokens=20))
    shares = [len(submits(made.workers[f"d{i}:1"])) for i in range(2)]
    assert shares == [4, 4]
    firsts = Counter(s.prefill[0].worker for i in range(2) for s in submits(made.workers[f"d{i}:1"]))
    assert firsts == {"p0": 4, "p1": 4}


def test_cached_prefixes_are_learnt_from_the_watch() -> None:
    made = world(prefill=3)
    prompt = tuple(range(100))
    keys = KeyChain(root_key(b"weights"), BLOCK).extend(prompt)
    made.apply(made.core.on_watch("p1:1", WatchEvent(sequence=4, stored=Stored(keys=b"".join(keys))), made.now))
    made.ask(request("a", prompt=prompt, max_tokens=4))
    assert submits(made.workers["d0:1"])[-1].prefill[0].worker == "p1"
    made.run()
    gone = WatchEvent(sequence=made.watching["p1:1"], removed=Removed(keys=keys[0]))
    made.apply(made.core.on_watch("p1:1", gone, made.now))
    firsts = set()
    for number in range(12):
        made.ask(request(f"b{number}", prompt=prompt, max_tokens=4))
        firsts.add(submits(made.workers["d0:1"])[-1].prefill[0].worker)
        made.run()
    assert firsts == {"p0", "p1", "p2"}


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
    for _ in range(14):
        made.advance()
    assert states(made)[victim.address] == "suspect"
    assert first.trace.attempts == 1
    made.ask(request("b"))
    assert len(submits(victim)) == 1
    for _ in range(12):
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
    assert not cancels(worker)
    made.run()
    assert client.outcomes == [None]
    numbers = [m.hello.session for m in worker.received if m.HasField("hello")]
    assert numbers == [1, 2]


def test_attempts_of_a_broken_session_are_cancelled_when_it_is_back() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    victim = next(w for w in made.workers.values() if submits(w))
    made.deliver()
    made.hang_up(victim.address)
    assert client.trace.attempts == 1
    made.connect()
    assert cancels(victim) == ["r.1"]
    made.run()
    assert client.outcomes == [None]
    assert client.trace.decode_worker != victim.name
    assert made.idle()


def test_a_worker_that_says_it_is_lost_is_believed() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    victim = next(w for w in made.workers.values() if submits(w))
    said(made, victim.name, pb.FromDecode(lost=pb.WorkerLost(reason="a plan is overdue")))
    assert states(made)[victim.address] == "lost"
    made.run()
    assert client.trace.decode_worker != victim.name


def test_a_refusal_goes_to_another_worker_at_once_and_never_loops() -> None:
    made = world(decode=2)
    for worker in made.workers.values():
        worker.faults = Faults(refuse=1.0)
    made.ask(request("r"))
    made.deliver()
    assert [len(submits(made.workers[f"d{i}:1"])) for i in range(2)] == [1, 1]
    for _ in range(40):
        made.advance(0.05)
    assert 4 <= sum(len(submits(w)) for w in made.workers.values()) <= 24
    for worker in made.workers.values():
        worker.faults = Faults()
    made.run()
    assert made.clients["r"].outcomes == [None]
    assert made.clients["r"].trace.attempts == 1


def test_a_permanent_refusal_is_the_clients_error() -> None:
    made = world()
    client = made.ask(request("r"))
    said(made, "d0", pb.FromDecode(refused=pb.AttemptRefused(attempt="r.1", reason="too long", permanent=True)))
    assert isinstance(client.outcomes[0], InvalidRequest)
    assert "too long" in failure(client)


def test_no_prefill_asks_others_first_then_decode_does_it_alone() -> None:
    made = world(prefill=4)
    made.workers["d0:1"].faults = Faults(no_prefill=1.0)
    client = made.ask(request("r", prompt=tuple(range(100))))
    for _ in range(60):
        made.advance(0.1)
    asked = [[w.worker for w in s.prefill] for s in submits(made.workers["d0:1"])]
    assert set(asked[1]) - set(asked[0])
    assert len(asked) == 6
    assert asked[-1] == []
    assert client.outcomes == [None]
    assert client.trace.prefill_worker == "local"


def test_clients_errors_never_count_against_a_worker() -> None:
    made = world(decode=2)
    for number in range(20):
        client = made.ask(request(f"bad{number}"))
        name = next(w.name for w in made.workers.values() if f"bad{number}.1" in w.works)
        failed = pb.AttemptFailed(attempt=f"bad{number}.1", reason="odd token", invalid=True)
        made.workers[f"{name}:1"].works.clear()
        said(made, name, pb.FromDecode(failed=failed))
        assert isinstance(client.outcomes[0], InvalidRequest)
        assert client.trace.attempts <= 1
    for number in range(10):
        made.ask(request(f"good{number}", max_tokens=20))
    assert min(len(submits(made.workers[f"d{i}:1"])) for i in range(2)) >= 5


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


def test_the_deadline_cancels_the_attempt() -> None:
    made = world()
    running = made.ask(replace(request("r", prompt=(99,), max_tokens=100), deadline_s=3.0))
    waiting = made.ask(replace(request("w", prompt=(1,) * 240, max_tokens=9), deadline_s=3.0))
    for _ in range(13):
        made.advance()
    assert isinstance(waiting.outcomes[0], DeadlineExceeded)
    assert isinstance(running.outcomes[0], DeadlineExceeded)
    assert cancels(made.workers["d0:1"]) == ["r.1"]
    assert running.ids[0]
    assert made.idle()


def test_with_no_worker_left_everybody_who_waits_is_told() -> None:
    made = world()
    made.die("d0:1")
    clients = [made.ask(request(f"r{number}")) for number in range(SCAN + 4)]
    for _ in range(30):
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


def test_a_large_request_is_overtaken_only_for_a_while() -> None:
    made = world()
    made.ask(request("first", prompt=(1,) * 40, max_tokens=60))
    large = made.ask(request("large", prompt=(1,) * 220, max_tokens=20))
    for small in range(120):
        if large.outcomes:
            break
        made.ask(request(f"small{small}", prompt=(1,) * 40, max_tokens=60))
        made.advance()
    assert large.outcomes == [None]
    attempts = [s.attempt for s in submits(made.workers["d0:1"])]
    assert 1 < attempts.index("large.1") < 20


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


def test_stopping_every_sample_ends_the_request() -> None:
    made = world()
    client = made.ask(request("r", max_tokens=9, n=2))
    made.stop("r", 0)
    assert not client.outcomes
    made.stop("r", 1)
    assert client.outcomes == [None]
    kinds = [m.WhichOneof("message") for m in made.workers["d0:1"].received[-3:]]
    assert kinds == ["stop_seq", "stop_seq", "ended"]
    made.ask(request("x"))
    with pytest.raises(IndexError):
        made.core.stop("x", 1, made.now)


def test_a_worker_that_left_finishes_what_it_has() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    leaver = next(w for w in made.workers.values() if submits(w))
    made.apply(made.core.set_members([a for a in made.workers if a != leaver.address], made.now))
    assert states(made)[leaver.address] == "draining"
    made.run()
    assert client.trace.decode_worker == leaver.name
    assert client.outcomes == [None]
    made.advance()
    assert leaver.address not in made.workers
    assert leaver.address not in states(made)


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
