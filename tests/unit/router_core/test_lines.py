"""What the log says of requests: each ending that an operator asks for, by both names, and nothing else."""

import logging

import pytest

from cluster.core.errors import DeadlineExceeded, Overloaded
from cluster.logs import ATTEMPT, REQUEST
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Blame
from router.follow import LOCAL
from tests.unit.router_core.fakes import request
from tests.unit.router_core.world import World, said, submits, world

WORD = "Zwetschgenknoedel"
Line = tuple[int, str, str]  # level, x-request-id, attempt


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "router.lines")


def lines(caplog: pytest.LogCaptureFixture) -> list[Line]:
    """What was logged, and a check that every line names its request in its text, too, and quotes nobody."""
    found = [record for record in caplog.records if record.name == "router.lines"]
    for record in found:
        assert getattr(record, REQUEST) in record.getMessage()
        assert WORD not in record.getMessage()
    return [(each.levelno, getattr(each, REQUEST), getattr(each, ATTEMPT, "")) for each in found]


def asked(made: World, **more: float) -> str:
    """One request that runs; the name of its attempt."""
    made.ask(request("ours", max_tokens=9)._replace(public_id="theirs", **more))  # type: ignore[arg-type]
    made.deliver()
    (submit,) = [submit for worker in made.workers.values() for submit in submits(worker)]
    return submit.attempt


def tell(made: World, message: pb.FromDecode) -> None:
    (name,) = [worker.name for worker in made.workers.values() if submits(worker)]
    said(made, name, message)


def test_a_healthy_request_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    made = world()
    asked(made)
    made.run()
    assert not lines(caplog)


@pytest.mark.parametrize(
    ("message", "level", "text"),
    [
        (pb.FromDecode(failed=pb.AttemptFailed(reason=WORD, blame=Blame.BLAME_WORKER)), logging.WARNING, "failed"),
        (pb.FromDecode(unknown=pb.UnknownAttempt()), logging.WARNING, "unknown to its worker"),
        (pb.FromDecode(preempted=pb.Preempted()), logging.INFO, "preempted"),
        (pb.FromDecode(preempted=pb.Preempted(draining=True)), logging.INFO, "handed over"),
        (pb.FromDecode(no_prefill=pb.NoPrefill(reason=WORD)), logging.INFO, "no prefill"),
        (pb.FromDecode(refused=pb.AttemptRefused(reason=WORD)), logging.DEBUG, "refused"),
    ],
    ids=lambda value: value.WhichOneof("message") if isinstance(value, pb.FromDecode) else None,
)
def test_an_attempt_that_ends_before_its_request(
    caplog: pytest.LogCaptureFixture, message: pb.FromDecode, level: int, text: str
) -> None:
    made = world(decode=2)
    attempt = asked(made)
    getattr(message, message.WhichOneof("message") or "").attempt = attempt
    tell(made, message)
    assert (level, "theirs", "ours.1") in lines(caplog)
    assert f": {text}" in caplog.text


def test_a_worker_that_dies(caplog: pytest.LogCaptureFixture) -> None:
    made = world(decode=2)
    asked(made)
    made.die(next(worker.address for worker in made.workers.values() if submits(worker)))
    made.run()
    assert (logging.WARNING, "theirs", "ours.1") in lines(caplog)
    assert "lost" in caplog.text


def test_a_prompt_that_decode_has_to_compute(caplog: pytest.LogCaptureFixture) -> None:
    made = world(local_max_tokens=0)
    attempt = asked(made)
    tell(made, pb.FromDecode(prefill_on=pb.PrefillOn(attempt=attempt, worker="p0")))
    assert not lines(caplog), "a hand-off is as it should be"
    tell(made, pb.FromDecode(prefill_on=pb.PrefillOn(attempt=attempt, worker=LOCAL)))
    assert lines(caplog) == [(logging.WARNING, "theirs", "ours.1")]
    assert "no hand-off from p0" in caplog.text


def test_bad_endings(caplog: pytest.LogCaptureFixture) -> None:
    made = world()
    client = made.ask(request("late", max_tokens=9)._replace(public_id="theirs-late", deadline_s=0.3))
    for worker in made.workers.values():
        worker.up = False
    made.now += 0.5
    made.apply(made.core.tick(made.now))
    assert isinstance(client.outcomes[0], DeadlineExceeded)
    assert lines(caplog)[-1] == (logging.WARNING, "theirs-late", "late.1")
    assert "ended: deadline, after 0.5 s, 1 attempts and 0 tokens" in caplog.text


def test_one_that_could_never_be_served_is_the_client_s_own_affair(caplog: pytest.LogCaptureFixture) -> None:
    made = world()
    attempt = asked(made)
    tell(made, pb.FromDecode(refused=pb.AttemptRefused(attempt=attempt, reason=WORD, permanent=True)))
    assert lines(caplog)[-1] == (logging.DEBUG, "theirs", "ours.1")
    assert "ended: invalid" in caplog.text


def test_a_flood_is_told_of_at_debug_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = World([], 0, queue_limit=1)
    made.ask(request("first"))
    with pytest.raises(Overloaded):
        made.ask(request("second")._replace(public_id="theirs-2"))
    assert lines(caplog) == [(logging.DEBUG, "theirs-2", "")]
