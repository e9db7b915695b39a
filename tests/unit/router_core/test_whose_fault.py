"""Failures that are not a worker's fault cost it nothing: deadlines, and what no worker can run (I8, I11)."""

import pytest

from cluster.core.errors import DeadlineExceeded, RequestFailed, Unavailable
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Blame
from tests.unit.router_core.fakes import FakeWorker, expected, request
from tests.unit.router_core.world import World, submits, world


def failing(made: World, request_id: str, number: int, blame: "Blame.ValueType") -> FakeWorker:
    """This attempt of a request fails where it runs. Returns where."""
    attempt = f"{request_id}.{number}"
    [worker] = [w for w in made.workers.values() if attempt in w.works]
    worker.works.pop(attempt)
    failed = pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt, reason="why", blame=blame))
    made.apply(made.core.on_session(worker.address, failed, made.now))
    return worker


def failures(made: World, worker: FakeWorker) -> int:
    return made.core._workers.by_address[worker.address].health.failures


def test_a_deadline_that_passes_on_decode_first_costs_its_worker_nothing() -> None:
    """Both tick ten times a second; whose tick comes first after the deadline is chance."""
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9, deadline_s=1.0))
    made.now += 1.001
    worker = failing(made, "r", 1, Blame.BLAME_DEADLINE)
    assert isinstance(client.outcomes[0], DeadlineExceeded)
    made.apply(made.core.tick(made.now + 0.05))
    assert len(client.outcomes) == 1
    assert failures(made, worker) == 0
    assert sum(len(submits(w)) for w in made.workers.values()) == 1, "it was placed again after its deadline"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(Blame.BLAME_DEADLINE, "deadline"), (Blame.BLAME_REQUEST, "invalid")],
    ids=["deadline", "request"],
)
def test_what_ends_with_its_request_is_no_failover(fault: "Blame.ValueType", outcome: str) -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    failing(made, "r", 1, fault)
    assert len(client.outcomes) == 1
    assert not made.core.overview(made.now).failovers
    [record] = made.core.records("r")
    assert [attempt.outcome.partition(":")[0] for attempt in record.attempts] == [outcome]
    made.ask(request("s", max_tokens=9))
    failing(made, "s", 1, Blame.BLAME_WORKER)
    assert [f.record.request_id for f in made.core.overview(made.now).failovers] == ["s"]


def test_what_one_worker_could_not_run_counts_against_it_as_soon_as_another_runs_it() -> None:
    made = world(decode=2)
    client = made.ask(request("r", max_tokens=9))
    first = failing(made, "r", 1, Blame.BLAME_UNSETTLED)
    assert failures(made, first) == 0, "it may be the request"
    [second] = [w for w in made.workers.values() if "r.2" in w.works]
    assert second is not first
    made.run(1)
    assert client.ids[0]
    assert not client.over
    assert (failures(made, first), failures(made, second)) == (1, 0)
    made.run()
    assert client.outcomes == [None]
    assert client.ids[0] == expected(client.request, 0)
    assert failures(made, first) == 1, "counted once"


def test_another_sample_that_goes_on_does_not_show_that_this_one_can_be_run() -> None:
    made = world(decode=2)
    made.ask(request("r", max_tokens=9, n=2))
    first = failing(made, "r", 1, Blame.BLAME_UNSETTLED)
    [second] = [w for w in made.workers.values() if "r.2" in w.works]
    for index, counted in ((1, 0), (0, 1)):
        run = pb.TokenRun(attempt="r.2", index=index, offset=0, ids=[5])
        made.apply(made.core.on_session(second.address, pb.FromDecode(tokens=pb.Tokens(runs=[run])), made.now))
        assert failures(made, first) == counted


def test_what_no_worker_can_run_ends_honestly_and_cools_nobody() -> None:
    made = world(decode=3, max_attempts=3)
    for number in range(10):
        poison = made.ask(request(f"poison{number}"))
        asked = {failing(made, f"poison{number}", attempt, Blame.BLAME_UNSETTLED).name for attempt in (1, 2, 3)}
        assert len(asked) == 3
        assert isinstance(poison.outcomes[0], RequestFailed)
        assert "3 attempts failed" in str(poison.outcomes[0])
    assert [failures(made, w) for w in made.workers.values()] == [0] * 4
    for number in range(9):
        made.ask(request(f"good{number}", max_tokens=20))
    made.run()
    assert all(made.clients[f"good{number}"].outcomes == [None] for number in range(9))
    assert made.core.gauges()["requests"] == 0


@pytest.mark.parametrize("second", [Blame.BLAME_WORKER, Blame.BLAME_UNSETTLED])
def test_a_worker_alone_cannot_make_it_the_requests_fault(second: "Blame.ValueType") -> None:
    """Nobody repeats its failure but itself: the client may well come again."""
    made = world(decode=1, max_attempts=2)
    client = made.ask(request("r"))
    failing(made, "r", 1, Blame.BLAME_UNSETTLED)
    failing(made, "r", 2, second)
    assert isinstance(client.outcomes[0], Unavailable)
