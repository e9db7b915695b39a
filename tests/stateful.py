"""Rule-based machines: how many histories each one is run for, and from which chance.

`make test` runs the same histories every time, so that it is red for a change and never by luck. `make verify` runs
many more, each time others, and a failure prints how to play it again. What is found there is added as a plain test.
"""

import unittest

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine

SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
settings.register_profile(
    "headrace", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=SLOW_IS_FINE
)


def quick(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> type[unittest.TestCase]:
    """The machine as a test of `make test`: always the same `examples` histories of at most `steps` rules."""
    bounds = settings(settings.get_profile("headrace"), max_examples=examples, stateful_step_count=steps)
    return _tests(machine, "Quick", bounds)


def long(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> type[unittest.TestCase]:
    """The same as a test of `make verify`, with other histories each time."""
    profile = settings.get_profile("headrace")
    bounds = settings(profile, derandomize=False, max_examples=examples, stateful_step_count=steps)
    return pytest.mark.verify(_tests(machine, "Long", bounds))


def _tests(machine: type[RuleBasedStateMachine], name: str, bounds: settings) -> type[unittest.TestCase]:
    # hypothesis keeps one TestCase per machine class
    own: type[RuleBasedStateMachine] = type(f"{name}{machine.__name__}", (machine,), {})
    tests: type[unittest.TestCase] = own.TestCase
    tests.settings = bounds  # type: ignore[attr-defined]
    return tests
