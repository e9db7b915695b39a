"""What the dashboard is told by the core: lives of workers, flows between pairs, failovers."""

import pytest

from router.flows import SLOT_S, SLOTS, Flows
from router.lives import LEFT_S, LOST_S, Lives
from router.overview import natural
from router.records import AttemptRecord, RequestRecord
from router.requests import Trace


def test_a_worker_that_comes_back_is_the_same_name_with_one_life_more() -> None:
    lives = Lives()
    lives.heard("decode-0", "decode", 1, 10.0, leaving=False)
    lives.heard("decode-0", "decode", 1, 20.0, leaving=False)
    assert lives.gone([], 21.0)[0].lives == 1
    assert lives.gone(["decode-0"], 21.0) == []
    lives.heard("decode-0", "decode", 2, 23.5, leaving=False)
    life = lives.get("decode-0")
    assert life is not None
    assert (life.lives, life.epoch, life.met, life.away_s) == (2, 2, 23.5, 3.5)


@pytest.mark.parametrize(("leaving", "remembered_s"), [(True, LEFT_S), (False, LOST_S)])
def test_who_is_gone_is_forgotten_in_the_end(leaving: bool, remembered_s: float) -> None:
    lives = Lives()
    lives.heard("decode-0", "decode", 1, 0.0, leaving=leaving)
    assert [life.name for life in lives.gone([], remembered_s)] == ["decode-0"]
    assert lives.gone([], remembered_s + 1) == []
    assert lives.get("decode-0") is None


def test_flows_add_up_by_pair_and_are_forgotten() -> None:
    flows = Flows(8)
    flows.handed_off(("p0", "d0"), 1000, 2.0, 1.0)
    flows.handed_off(("p0", "d0"), 500, 4.0, 2.0)
    flows.handed_off(("p1", "d0"), 7, 0.0, 30.0)
    assert flows.moved(30.0) == {("p0", "d0"): (2, 1500, 6.0), ("p1", "d0"): (1, 7, 0.0)}
    assert flows.moved(2.0 + SLOT_S * SLOTS + 1) == {("p1", "d0"): (1, 7, 0.0)}


def attempt(decode: str) -> AttemptRecord:
    return AttemptRecord(decode, (), False, (), 0.0)


def test_failovers_are_those_of_attempts_that_failed_and_name_who_went_on() -> None:
    flows = Flows(2)
    record = RequestRecord("r", "p", 1, 1, 1, "", 0.0, Trace(), [attempt("d0")])
    for outcome in ("refused: full", "no prefill: busy", "ok"):
        flows.attempt_ended(record, outcome, 1.0)
    assert not flows.failovers
    flows.attempt_ended(record, "lost: worker is silent", 1.0)
    (failover,) = flows.failovers
    assert (failover.failed.decode, failover.successor) == ("d0", None)
    record.attempts.append(attempt("d1"))
    assert failover.successor is record.attempts[1]
    for _ in range(9):
        flows.attempt_ended(record, "failed: x", 2.0)
    assert len(flows.failovers) == 2, "no more than requests are remembered"
    forgetful = Flows(0)
    forgetful.attempt_ended(record, "failed: x", 2.0)
    assert not forgetful.failovers


def test_names_sort_as_people_count() -> None:
    names = ["decode-10", "decode-2", "10.0.0.1:80", "prefill-0"]
    assert sorted(names, key=natural) == ["10.0.0.1:80", "decode-2", "decode-10", "prefill-0"]
