"""What is kept of recent requests: enough to explain them, nothing of what they said, and not for ever."""

from cluster.core.errors import Unavailable
from cluster.stubs import session_pb2 as pb
from router.records import Records, record_of
from router.requests import Trace
from tests.unit.router_core.fakes import request
from tests.unit.router_core.world import failure, said, world


def test_only_the_newest_are_kept() -> None:
    records = Records(2)
    kept = [record_of(request(name), Trace(), 0.0) for name in ("a", "b", "c")]
    for record in kept:
        records.add(record)
    assert len(records) == 2
    assert records.find("a") == records.find("public-a") == []
    assert records.find("c") == records.find("public-c") == [kept[2]]
    off = Records(0)
    off.add(kept[0])
    assert len(off) == 0


def test_one_public_id_may_name_many() -> None:
    """Clients choose it: the newest comes first, and each stays to be found by our own id."""
    records = Records(2)
    kept = [record_of(request(name), Trace(), 0.0) for name in ("a", "b", "c")]
    for record in kept:
        record.public_id = "same"
        records.add(record)
    assert records.find("same") == [kept[2], kept[1]]
    assert records.find("b") == [kept[1]]


def test_every_attempt_is_told_with_its_reasons_and_its_end() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    [record] = made.core.records("public-r")
    first = record.attempts[0]
    assert (record.outcome, first.outcome, first.prefill, len(first.considered)) == ("", "", ("p0",), 2)
    made.now += 0.5
    said(made, first.decode, pb.FromDecode(refused=pb.AttemptRefused(attempt="r.1", reason="full", free_blocks=0)))
    made.run()
    assert client.outcomes == [None]
    assert [a.outcome for a in record.attempts] == ["refused: full", "ok"]
    assert (first.ended_ms, record.attempts[1].placed_ms) == (500.0, 500.0)
    assert record.attempts[1].decode == first.considered[1].decode
    second = record.attempts[1]
    assert second.accepted_ms is not None
    assert second.first_token_ms is not None
    assert 500.0 <= second.accepted_ms <= second.first_token_ms <= (second.ended_ms or 0) == record.ended_ms
    assert record.outcome == "ok"
    assert record.trace.timings_ms["ttft"] + record.trace.timings_ms["decode"] == record.ended_ms


def test_why_a_request_waits_and_why_it_failed() -> None:
    made = world()
    made.workers["d0:1"].blocks = 0
    made.heartbeat()
    made.ask(request("full"))
    assert made.core.records("full")[0].waiting_for == "decode workers are full"
    made.cancel("full")
    assert made.core.records("full")[0].outcome == "cancelled"
    made.die("d0:1")
    client = made.ask(request("lost"))
    made.run()
    assert isinstance(client.outcomes[0], Unavailable)
    assert made.core.records("lost")[0].outcome == f"unavailable: {failure(client)}"


def test_one_that_runs_is_known_by_our_id_however_many_came_since() -> None:
    """Who follows it (a trace of its call) needs its marks to the end."""
    for limit in (0, 1):
        made = world(debug_requests=limit)
        made.ask(request("long"))
        made.ask(request("newer"))
        [record] = made.core.records("long")
        assert (record.request_id, made.core.records("public-long")) == ("long", [])
        made.run()
        assert (record.outcome, made.core.records("long")) == ("ok", [])


def test_a_prompt_that_decode_reads_by_itself_has_its_prefill_time() -> None:
    made = world(prefill=0)
    client = made.ask(request("r"))
    said(made, "d0", pb.FromDecode(prefill_on=pb.PrefillOn(attempt="r.1", worker="local")))
    made.now += 0.25
    run = pb.TokenRun(attempt="r.1", index=0, offset=0, ids=[7])
    said(made, "d0", pb.FromDecode(tokens=pb.Tokens(runs=[run])))
    assert client.trace.timings_ms["prefill"] == 250.0
