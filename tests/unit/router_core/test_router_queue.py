"""The admission queue: bounded, ordered, honest about waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import IntegrityError, Overloaded
from router.queue import HOLD_S, OVERTAKE_S, SCAN, AdmissionQueue


def test_the_line_is_bounded_and_a_freed_place_is_free() -> None:
    queue = AdmissionQueue(2)
    queue.admit("a", 0.0, 600.0)
    queue.admit("b", 0.0, 600.0)
    with pytest.raises(Overloaded) as told:
        queue.admit("c", 0.0, 600.0)
    assert told.value.retry_after_s == 5.0
    queue.drop("a")
    queue.drop("a")
    queue.admit("c", 0.0, 600.0)
    queue.take("b", 0.0)
    queue.admit("d", 0.0, 600.0)
    assert queue.ids() == ["c", "d"]


def test_who_comes_back_is_never_refused_and_returning_work_goes_first() -> None:
    queue = AdmissionQueue(3)
    entries = {name: queue.admit(name, 0.0, 600.0) for name in "abc"}
    for name in "abc":
        queue.take(name, 0.0)
    for name in "xyz":
        queue.admit(name, 0.0, 600.0)
    queue.put_back(entries["b"], 1.0, returning=False, not_before=0.0)
    queue.put_back(entries["c"], 1.0, returning=True, not_before=0.0)
    queue.put_back(entries["a"], 1.0, returning=True, not_before=0.0)
    assert queue.ids() == ["a", "c", "b", "x", "y", "z"]
    queue.check_integrity()


def test_nobody_waits_twice() -> None:
    queue = AdmissionQueue(3)
    entry = queue.admit("a", 0.0, 600.0)
    with pytest.raises(IntegrityError):
        queue.put_back(entry, 0.0, returning=False, not_before=0.0)


def test_overtaking_is_bounded_from_the_first_time_there_was_no_room() -> None:
    queue = AdmissionQueue(3)
    entry = queue.admit("a", 0.0, 600.0)
    assert not queue.overdue(entry, 50.0)
    assert not queue.overdue(entry, 50.0 + OVERTAKE_S / 2)
    assert queue.overdue(entry, 50.0 + OVERTAKE_S)
    assert queue.overdue(entry, 49.9 + OVERTAKE_S + HOLD_S)
    assert not queue.overdue(entry, 50.0 + OVERTAKE_S + HOLD_S)
    assert queue.overdue(entry, 50.0 + 2 * OVERTAKE_S + HOLD_S)


def test_waiting_is_estimated_from_the_drain_rate_while_somebody_waits() -> None:
    queue = AdmissionQueue(100)
    assert queue.expected_wait_s(0.0) == 0.0
    for number in range(60):
        queue.admit(f"r{number}", 1000.0, 600.0)
    assert queue.expected_wait_s(1001.0) is None
    for number in range(20):
        queue.take(f"r{number}", 1000.5 + number / 10)
    assert queue.expected_wait_s(1004.0) == pytest.approx(40 * 4.0 / 20)
    assert queue.retry_after_s(1004.0) == pytest.approx(4.0)
    with pytest.raises(Overloaded, match="after the deadline"):
        queue.admit("impatient", 1004.0, 5.0)
    queue.admit("patient", 1004.0, 10.0)


def test_an_idle_hour_is_not_a_slow_queue() -> None:
    queue = AdmissionQueue(100)
    for number in range(20):
        queue.admit(f"old{number}", float(number), 600.0)
        queue.take(f"old{number}", float(number))
    for number in range(50):
        queue.admit(f"new{number}", 3600.0, 1.0)
    assert queue.expected_wait_s(3600.1) is None


def test_a_round_looks_at_the_first_entries_only() -> None:
    queue = AdmissionQueue(100)
    for number in range(50):
        queue.admit(f"r{number}", 0.0, 600.0)
    assert [entry.request_id for entry in queue.scan()] == [f"r{number}" for number in range(SCAN)]


@given(st.lists(st.tuples(st.sampled_from("atdb"), st.integers(0, 9), st.booleans())))
def test_the_line_is_always_in_order_and_agrees_with_its_index(steps: list[tuple[str, int, bool]]) -> None:
    queue, entries, out = AdmissionQueue(5), {}, {}
    for at, (what, number, returning) in enumerate(steps):
        name = f"r{number}"
        if what == "a" and name not in entries and len(queue) < 5:
            entries[name] = queue.admit(name, at, 600.0)
        elif what == "t" and name in queue:
            queue.take(name, at)
            out[name] = entries[name]
        elif what == "d" and name in entries:
            queue.drop(name)
            del entries[name]
            out.pop(name, None)
        elif what == "b" and name in out:
            queue.put_back(out.pop(name), at, returning=returning, not_before=0.0)
        queue.check_integrity()
        assert set(queue.ids()) == set(entries) - set(out)
