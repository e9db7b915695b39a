"""The admission queue: bounded, ordered, honest about waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import IntegrityError, Overloaded
from router.queue import HOLD_S, MARGIN, OVERTAKE_S, SCAN, AdmissionQueue, LineBounds
from router.requests import Request


def line(requests: int, tokens: int = 1_000_000, slo_ttft_s: float | None = None, **weights: float) -> AdmissionQueue:
    return AdmissionQueue(LineBounds(requests, tokens, slo_ttft_s, weights))


def request(
    name: str, deadline_s: float = 600.0, *, prompt: int = 10, tenant: str = "", priority: int = 0, max_tokens: int = 5
) -> Request:
    return Request(name, "x", (7,) * prompt, max_tokens, deadline_s=deadline_s, tenant=tenant, priority=priority)


def test_the_line_is_bounded_and_a_freed_place_is_free() -> None:
    queue = line(2)
    queue.admit(request("a"), 0.0)
    queue.admit(request("b"), 0.0)
    with pytest.raises(Overloaded) as told:
        queue.admit(request("c"), 0.0)
    assert told.value.retry_after_s == 5.0
    queue.drop("a", 0.0)
    queue.drop("a", 0.0)
    queue.admit(request("c"), 0.0)
    queue.take("b", 0.0)
    queue.admit(request("d"), 0.0)
    assert queue.ids() == ["c", "d"]


def test_who_comes_back_is_never_refused_and_returning_work_goes_first() -> None:
    queue = line(3)
    entries = {name: queue.admit(request(name), 0.0) for name in "abc"}
    for name in "abc":
        queue.take(name, 0.0)
    for name in "xyz":
        queue.admit(request(name), 0.0)
    queue.put_back(entries["b"], 1.0, returning=False, not_before=0.0)
    queue.put_back(entries["c"], 1.0, returning=True, not_before=0.0)
    queue.put_back(entries["a"], 1.0, returning=True, not_before=0.0)
    assert queue.ids() == ["a", "c", "b", "x", "y", "z"]
    queue.check_integrity()


def test_nobody_waits_twice() -> None:
    queue = line(3)
    entry = queue.admit(request("a"), 0.0)
    with pytest.raises(IntegrityError):
        queue.put_back(entry, 0.0, returning=False, not_before=0.0)


def test_overtaking_is_bounded_from_the_first_time_there_was_no_room() -> None:
    queue = line(3)
    entry = queue.admit(request("a"), 0.0)
    assert not queue.overdue(entry, 50.0)
    assert not queue.overdue(entry, 50.0 + OVERTAKE_S / 2)
    assert queue.overdue(entry, 50.0 + OVERTAKE_S)
    assert queue.overdue(entry, 49.9 + OVERTAKE_S + HOLD_S)
    assert not queue.overdue(entry, 50.0 + OVERTAKE_S + HOLD_S)
    assert queue.overdue(entry, 50.0 + 2 * OVERTAKE_S + HOLD_S)


def test_waiting_is_estimated_from_the_drain_rate_while_somebody_waits() -> None:
    queue = line(100)
    assert queue.expected_wait_s(0.0) == 0.0
    for number in range(60):
        queue.admit(request(f"r{number}"), 1000.0)
    assert queue.expected_wait_s(1000.4) is None
    for number in range(20):
        queue.take(f"r{number}", 1000.5 + number / 10)
    assert queue.expected_wait_s(1004.0) == pytest.approx(40 * 4.0 / 20)
    assert queue.retry_after_s(1004.0) == pytest.approx(4.0)
    with pytest.raises(Overloaded, match="after the deadline"):
        queue.admit(request("impatient", 5.0), 1004.0)
    queue.admit(request("patient", 10.0), 1004.0)


def test_a_line_that_stands_for_a_while_rules_nobody_out_by_a_deadline() -> None:
    """While workers are restarted hardly anybody leaves: that says little about the time after it."""
    queue = line(100)
    for number in range(4):
        queue.admit(request(f"r{number}", 30.0), 0.0)
    queue.admit(request("with nobody gone", 30.0), 8.0)
    assert queue.expected_wait_s(8.0) == pytest.approx(5 * 8.0)
    queue.take("r0", 9.0)
    assert (queue.expected_wait_s(9.0) or 0.0) * 5 / 4 * (1 - 2**-0.5) < 30.0
    queue.admit(request("with one gone", 30.0), 9.0)
    with pytest.raises(Overloaded, match="after the deadline"):
        queue.admit(request("in a hurry", 1.0), 9.0)


def test_a_time_without_any_worker_is_no_pace() -> None:
    """Nobody leaves for 29 s, since there is nobody to go to; then ten a second do, and nine seconds are left."""
    queue = line(200, slo_ttft_s=60.0)
    for number in range(100):
        queue.admit(request(f"r{number}"), 0.0)
    for second in range(29):
        queue.stood_still(1.0, second + 1.0)
    for number in range(10):
        queue.take(f"r{number}", 29.1 + number / 10)
    assert queue.expected_wait_s(30.0) == pytest.approx(90 / 10)
    queue.admit(request("in time", 15.0), 30.0)
    with pytest.raises(Overloaded, match="after the deadline"):
        queue.admit(request("in a hurry", 2.0), 30.0)


def test_an_idle_hour_is_not_a_slow_queue() -> None:
    queue = line(100)
    for number in range(20):
        queue.admit(request(f"old{number}"), float(number))
        queue.take(f"old{number}", float(number))
    for number in range(50):
        queue.admit(request(f"new{number}", 1.0), 3600.0)
    assert queue.expected_wait_s(3600.1) is None


def test_a_round_looks_at_the_first_entries_only() -> None:
    queue = line(100)
    for number in range(50):
        queue.admit(request(f"r{number}"), 0.0)
    assert [entry.request_id for entry in queue.scan()] == [f"r{number}" for number in range(SCAN)]


@given(st.lists(st.tuples(st.sampled_from("atdb"), st.integers(0, 9), st.booleans())))
def test_the_line_is_always_in_order_and_agrees_with_its_index(steps: list[tuple[str, int, bool]]) -> None:
    queue, entries, out = line(5), {}, {}
    for at, (what, number, returning) in enumerate(steps):
        name = f"r{number}"
        if what == "a" and name not in entries and len(queue) < 5:
            entries[name] = queue.admit(request(name), at)
        elif what == "t" and name in queue:
            queue.take(name, at)
            out[name] = entries[name]
        elif what == "d" and name in entries:
            queue.drop(name, at)
            del entries[name]
            out.pop(name, None)
        elif what == "b" and name in out:
            queue.put_back(out.pop(name), at, returning=returning, not_before=0.0)
        queue.check_integrity()
        assert set(queue.ids()) == set(entries) - set(out)


def test_the_line_is_bounded_by_prompt_tokens_but_one_prompt_always_fits() -> None:
    queue = line(100, tokens=50)
    queue.admit(request("huge", prompt=80), 0.0)
    with pytest.raises(Overloaded):
        queue.admit(request("a"), 0.0)
    queue.take("huge", 0.0)
    for name in "abcde":
        queue.admit(request(name), 0.0)
    assert queue.tokens == 50
    with pytest.raises(Overloaded):
        queue.admit(request("f", prompt=1), 0.0)


def fill(queue: AdmissionQueue, tenant: str, **more: int) -> int:
    """As many requests as this tenant gets in."""
    for number in range(10_000):
        try:
            queue.admit(request(f"{tenant}{len(queue)}.{number}", tenant=tenant, **more), 0.0)
        except Overloaded:
            return number
    raise AssertionError("no bound")


def test_no_tenant_fills_the_line_alone_and_who_has_nothing_in_it_gets_a_place() -> None:
    queue = line(100, a=1, b=1, c=1)
    assert fill(queue, "a") == 80
    assert fill(queue, "b") == 16
    assert fill(queue, "c") == 4
    for tenant, weight in (("a", 4.0), ("b", 1.0)):
        queue = line(100, a=4, b=1)
        assert fill(queue, tenant) == pytest.approx(100 * 4 * weight / (1 + 4 * weight), abs=1)
    queue = line(1000, 1000, a=1, b=1)
    assert fill(queue, "a", prompt=50) == 16
    assert fill(queue, "b", prompt=10) > 4
    assert fill(line(100), "") == 100, "with one tenant there is nobody to keep a place for"


def test_early_refusals_say_when_to_come_again() -> None:
    """Ten requests a second leave; the twentieth in line waits for 2 s, and then half a second for its first token.

    Ten departures leave a doubt of 1 / sqrt(11): it may be 2.6 s, and 2.7 s for the one after it.
    """
    slo_s = 0.5 + 2.0 * (1 + 11**-0.5) / MARGIN + 0.01
    queue = line(100, slo_ttft_s=slo_s)
    for number in range(29):
        queue.admit(request(f"r{number}"), 0.0)
    for number in range(10):
        queue.take(f"r{number}", 0.05 + number / 10)
    queue.answers.first_token(10, 0.5)
    queue.admit(request("in time"), 1.0)
    with pytest.raises(Overloaded, match=r"in about 3\.2 s; [\d.]+ s are promised") as told:
        queue.admit(request("too late"), 1.0)
    assert told.value.retry_after_s == 1.0
    queue.admit(request("urgent", priority=-1), 1.0)
    assert queue.ids()[0] == "urgent"


def test_a_line_that_was_empty_for_a_moment_is_no_new_one() -> None:
    """The pace is that of the time in which somebody waited: four seconds, eight requests."""
    queue = line(100)
    for number in range(8):
        queue.admit(request(f"r{number}"), 10.0 * number)
        queue.take(f"r{number}", 10.0 * number + 0.5)
    for number in range(6):
        queue.admit(request(f"new{number}"), 100.0)
    assert queue.expected_wait_s(100.0) == pytest.approx(6 * 0.5)


def test_who_waited_for_nothing_says_nothing_of_the_pace() -> None:
    queue = line(100)
    for number in range(50):
        queue.admit(request(f"r{number}"), number)
        queue.take(f"r{number}", number)
    queue.admit(request("a"), 100.0)
    assert queue.expected_wait_s(103.0) == pytest.approx(3.0), "nobody has left for three seconds"


def test_a_cluster_that_is_slower_than_promised_still_serves_who_need_not_wait() -> None:
    queue = line(100, slo_ttft_s=1.0)
    queue.answers.first_token(10, 5.0)
    queue.admit(request("a"), 0.0)
    queue.take("a", 0.0)
    assert len(queue) == 0
    queue.admit(request("b"), 0.0)


def test_who_comes_later_and_goes_before_is_reckoned_with() -> None:
    """Half of the pace goes to prompts of another length that keep coming: a line of short ones takes twice as long.

    So 4.1 s, and with the doubt that forty departures leave 4.7 s.
    """
    queue = line(1000, slo_ttft_s=4.0 * (1 + 41**-0.5) / MARGIN)
    queue.answers.answered(0)  # work is the prompt alone
    for number in range(80):
        queue.admit(request(f"s{number}", prompt=100), 0.0)
    for number in range(8):  # every half second a long one comes and is served, and five short ones beside
        queue.admit(request(f"l{number}", prompt=500), number / 2)
        for short in range(5):
            queue.take(f"s{5 * number + short}", number / 2 + 0.25)
        queue.take(f"l{number}", number / 2 + 0.25)
    assert queue.expected_wait_s(4.0) == pytest.approx(2.0), "were it served in order of arrival"
    with pytest.raises(Overloaded, match=r"about 4\.7 s"):
        queue.admit(request("short", prompt=100), 4.0)
    queue.admit(request("long", prompt=500), 4.0)
