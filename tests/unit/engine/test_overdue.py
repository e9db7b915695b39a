"""Step durations: averages follow what was measured, and only a really late plan is overdue."""

from engine.overdue import OverdueWatch


def test_reading_and_decoding_are_measured_apart() -> None:
    watch = OverdueWatch()
    watch.done(256, 0.5)
    watch.done(4, 0.02)
    assert watch.reading_rate == 512
    assert watch.decode_step_s == 0.02
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
