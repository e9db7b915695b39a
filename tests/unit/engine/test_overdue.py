"""Step durations: the average follows what was measured, and only a really late plan is overdue."""

from engine.overdue import OverdueWatch


def test_the_pace_is_that_of_steps_that_read() -> None:
    watch = OverdueWatch()
    watch.done(256, 0.5)
    watch.done(4, 0.02)
    assert watch.reading_rate == 512
    watch.done(256, 1.0)
    assert 256 < watch.reading_rate < 512


def test_an_estimate_before_anything_was_measured_is_pessimistic() -> None:
    assert OverdueWatch().predict(200) == 1.0


def test_a_plan_is_overdue_after_ten_seconds_or_twenty_times_its_estimate() -> None:
    watch = OverdueWatch()
    assert not watch.overdue(1, 9.9)
    assert watch.overdue(1, 10.1)
    assert not watch.overdue(256, 25.0)
    assert watch.overdue(256, 26.0)


def test_late_comes_long_before_overdue_and_follows_what_is_usual() -> None:
    watch = OverdueWatch()
    watch.done(256, 1.0)
    assert not watch.late(1, 2.4)
    assert watch.late(1, 2.6)
    assert not watch.late(256, 5.9)
    assert watch.late(256, 6.1)


def test_silence_is_counted_for_plans_and_for_whatever_else_was_asked() -> None:
    watch = OverdueWatch()
    assert watch.silence(10.0, None, asked=False) == 0.0
    assert watch.silence(10.0, 7.0, asked=False) == 3.0
    assert watch.silence(20.0, None, asked=True) == 0.0
    assert watch.silence(22.0, None, asked=True) == 2.0
    assert watch.silence(22.0, 19.0, asked=True) == 3.0
    watch.slept(1.5)
    assert watch.silence(22.0, None, asked=True) == 0.5
    watch.heard()
    assert watch.silence(23.0, None, asked=True) == 0.0
    assert watch.silence(25.0, None, asked=False) == 0.0
    assert watch.silence(30.0, None, asked=True) == 0.0
