"""What a worker learns of its own pace from its steps."""

import pytest

from cluster.core.keys import KeyChain, root_key
from engine.batcher import Batcher
from engine.blocks import BlockBooks
from engine.rates import StepRates, Work, depth_bound, report_queue
from engine.scheduler import StepBudget
from engine.sequence import Sequence


def test_nothing_is_known_before_the_first_step() -> None:
    rates = StepRates()
    rates.done(Work((), 0, 0), 1.0)
    assert (rates.prefill(), rates.steps()) == ([], [])


def test_reading_is_measured_by_depth() -> None:
    rates = StepRates()
    rates.done(Work(((0, 256),), 0, 0), 0.5)
    rates.done(Work(((3840, 256),), 0, 0), 1.0)
    assert rates.prefill() == [(512, 512.0), (4096, 256.0)]
    rates.done(Work(((256, 128), (8192, 128)), 0, 0), 1.0)
    assert [depth for depth, _ in rates.prefill()] == [512, 4096, 16384]
    assert dict(rates.prefill())[16384] == 256.0


def test_an_average_follows_what_is_measured_and_forgets_an_odd_step() -> None:
    rates = StepRates()
    rates.done(Work(((0, 100),), 0, 0), 10.0)
    for _ in range(30):
        rates.done(Work(((0, 100),), 0, 0), 0.1)
    assert rates.prefill()[0][1] == pytest.approx(1000, rel=0.15)


def test_steps_are_measured_by_batch_and_context() -> None:
    rates = StepRates()
    rates.done(Work((), 1, 100), 0.010)
    rates.done(Work((), 20, 20_000), 0.030)
    rates.done(Work((), 24, 24_000), 0.030)
    (small, large) = rates.steps()
    assert small == (1, 100, 0.010)
    assert large[:2] == (22, 22222)
    assert large[2] == pytest.approx(0.030)


def test_reading_between_streams_is_charged_what_decoding_alone_would_not_have_taken() -> None:
    rates = StepRates()
    rates.done(Work(((0, 100),), 4, 1000), 0.2)
    assert rates.prefill() == []
    rates.done(Work((), 4, 1000), 0.1)
    rates.done(Work(((0, 100),), 5, 1200), 0.3)
    assert dict(rates.prefill()) == pytest.approx({512: 500.0})


def test_bounds_of_depth_double() -> None:
    assert [depth_bound(at) for at in (0, 511, 512, 1023, 1024, 100_000)] == [512, 512, 1024, 1024, 2048, 131_072]


def test_a_very_long_queue_is_told_shortened() -> None:
    assert report_queue([5, 0, 3]) == [3, 5]
    told = report_queue(range(1, 101))
    assert (len(told), sum(told), told[0]) == (32, 5050, 1)


def test_a_plan_says_what_it_costs() -> None:
    batcher = Batcher(BlockBooks(20), 4, StepBudget(chunk_tokens=16, max_batch=4), make_room=lambda _: False)
    for number, (length, computed) in enumerate(((30, 4), (9, 8))):
        tokens = list(range(length))
        sequence = Sequence(number, tokens, KeyChain(root_key(b"w"), 4), [], 0.0, computed=computed, runnable=True)
        assert sequence.reserve(batcher.books, computed, 4)
        batcher.add(sequence)
    assert batcher.in_flight_work == Work((), 0, 0)
    assert batcher.next_step(0.0) is not None
    assert batcher.in_flight_work == Work(((4, 15),), 1, 9)
