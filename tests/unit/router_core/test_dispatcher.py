"""The dispatcher's core, one situation at a time: admission, placement, membership, ends."""

import json

import pytest

from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from cluster.core.keys import KeyChain, root_key
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import Removed, Stored, WatchEvent
from tests.unit.router_core.fakes import BLOCK, FakeWorker, Faults, expected, request
from tests.unit.router_core.world import World, cancels, failure, said, states, submits, world


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


def test_what_fits_is_what_the_workers_that_are_there_hold() -> None:
    """A larger worker comes and leaves again, and one comes back smaller than it was."""
    made = World([FakeWorker("d0", "decode")])
    made.connect()
    assert made.core.limits(made.now).pool_tokens == 64 * BLOCK
    made.workers["d1:1"] = FakeWorker("d1", "decode", epoch=2, blocks=100)
    made.apply(made.core.set_members(list(made.workers), made.now))
    made.connect()
    assert made.core.limits(made.now).pool_tokens == 100 * BLOCK
    made.apply(made.core.set_members(["d0:1"], made.now))
    made.advance(1.0)
    assert made.core.limits(made.now).pool_tokens == 64 * BLOCK
    made.die("d0:1")
    worker = made.workers["d0:1"]
    worker.restart()
    worker.up, worker.blocks, worker.max_context = True, 32, 128
    made.advance(1.0)
    assert (made.core.limits(made.now).pool_tokens, made.core.limits(made.now).max_context) == (32 * BLOCK, 128)


def test_the_status_is_json_and_names_states_and_gauges() -> None:
    made = world()
    made.ask(request("r"))
    status = json.loads(json.dumps(made.core.status(made.now)))
    assert status["gauges"] == {"requests": 1, "queued": 0, "queued_tokens": 0, "attempts": 1, "bookings": 1}
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
    booked = [sum(b.tokens for b in made.core._workers.by_address[f"p{i}:1"].bookings.values()) for i in range(2)]
    assert booked[0] == booked[1] >= 2 * 28


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
    assert len(asked) == 4
    assert asked[-1] == []
    assert client.outcomes == [None]
    assert (client.trace.prefill_worker, client.trace.attempts) == ("local", 1)


def test_the_deadline_cancels_the_attempt() -> None:
    made = world()
    running = made.ask(request("r", prompt=(99,), max_tokens=100)._replace(deadline_s=3.0))
    waiting = made.ask(request("w", prompt=(1,) * 240, max_tokens=9)._replace(deadline_s=3.0))
    for _ in range(13):
        made.advance()
    assert isinstance(waiting.outcomes[0], DeadlineExceeded)
    assert isinstance(running.outcomes[0], DeadlineExceeded)
    assert cancels(made.workers["d0:1"]) == ["r.1"]
    assert running.ids[0]
    assert made.idle()


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


def test_a_prompt_beyond_the_window_is_overtaken_on_prefill_only_for_a_while() -> None:
    """It is taken when nothing is queued there; shorter ones, which still fit, see to it that this is never so."""
    made = world()
    prefill, decode = made.workers["p0:1"], made.workers["d0:1"]
    decode.blocks, prefill.window_tokens, prefill.chunk_tokens, prefill.queued_tokens = 999, 120, 16, 20
    made.heartbeat()
    long = made.ask(request("long", prompt=(1,) * 150))
    for short in range(40):
        if long.over:
            break
        sent = len(submits(decode))
        made.ask(request(f"short{short}", prompt=(2,) * 90))
        prefill.queued_tokens = 20 if len(submits(decode)) > sent else 0
        made.advance()
    assert long.outcomes == [None]
    assert long.trace.prefill_worker == "p0"
    attempts = [s.attempt for s in submits(decode)]
    assert 4 < attempts.index("long.1") < 20, "it was overtaken, for a while"
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
