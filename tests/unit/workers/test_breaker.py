"""A prefill worker whose hand-offs fail is left alone for a while, by the decode worker that sees it (F13)."""

import pytest

from cluster.core.ids import agent_name
from decode_worker.breaker import LONGEST_PAUSE_S, Breaker
from tests.fakes.world import World
from tests.unit.workers.test_faults import counters, warm_world
from tests.unit.workers.test_tracer_matrix import B, expected, prompt

FAILURES = 3


def test_it_opens_after_some_failures_in_a_row_and_lets_one_try_pass_per_pause() -> None:
    breaker = Breaker(FAILURES)
    for _ in range(FAILURES - 1):
        assert not breaker.failed(0.0)
        assert breaker.allows(0.0)
    assert breaker.failed(0.0)
    assert [breaker.allows(at) for at in (0.0, 0.9, 1.0, 1.1, 1.9, 2.0)] == [False, False, True, False, False, True]
    assert breaker.failed(2.0)
    assert [breaker.allows(at) for at in (2.1, 3.9, 4.0)] == [False, False, True]
    breaker.succeeded()
    assert breaker.allows(4.0)
    assert not breaker.failed(4.0)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(FAILURES)
    for at in range(20):
        assert not breaker.failed(at)
        breaker.succeeded()
    assert breaker.allows(20.0)


def test_a_limit_of_zero_never_opens() -> None:
    breaker = Breaker(0)
    assert not any(breaker.failed(0.0) for _ in range(100))
    assert breaker.allows(0.0)


def test_its_pause_is_bounded() -> None:
    breaker = Breaker(FAILURES)
    for _ in range(5000):
        breaker.failed(0.0)
    assert breaker.allows(LONGEST_PAUSE_S)


def serve(world: World, seed: int) -> list[str]:
    """A request of its own; returns whom its decode worker asked."""
    ids = prompt(6 * B + 5, seed)
    attempt = world.submit(ids, 8, ignore_eos=True)
    world.run(check=True)
    while not world.answers[attempt].ends:
        world.wait(0.5)
    assert world.answers[attempt].tokens[0] == expected(ids, 8)
    return world.answers[attempt].prefill_on


@pytest.fixture
def broken() -> tuple[World, object]:
    """The link to prefill-0 is up, but nothing can be read from it; the memory it lost is the second value."""
    world = warm_world()
    return world, world.memories.pop(agent_name("prefill-0", 1))


def test_a_wire_that_is_broken_is_not_tried_by_every_request(broken: tuple[World, object]) -> None:
    world, _ = broken
    for number in range(FAILURES):
        assert serve(world, number)[0] == "prefill-0"
    assert counters(world)["breaker_opened"] == 1
    asked = [serve(world, 100 + number) for number in range(5)]
    assert all(names == ["prefill-1"] for names in asked), asked
    world.wait(8)
    world.assert_quiet()


def test_a_wire_that_works_again_is_used_again(broken: tuple[World, object]) -> None:
    world, memory = broken
    for number in range(FAILURES):
        serve(world, number)
    assert serve(world, 50) == ["prefill-1"]
    world.memories[agent_name("prefill-0", 1)] = memory  # type: ignore[assignment]
    world.wait(1.5)
    for number in range(60, 65):
        assert serve(world, number) == ["prefill-0"]


def test_a_hand_off_that_reads_nothing_says_nothing_of_the_wire(broken: tuple[World, object]) -> None:
    world, memory = broken
    for number in range(FAILURES):
        serve(world, number)
    world.wait(1.5)
    assert serve(world, 0) == ["prefill-0"], "the try after the pause: every block of this prompt is here"
    assert counters(world)["breaker_opened"] == 1
    assert serve(world, 50) == ["prefill-1"]
    world.memories[agent_name("prefill-0", 1)] = memory  # type: ignore[assignment]
    world.wait(1.5)
    for number in range(60, 65):
        assert serve(world, number) == ["prefill-0"]


def test_another_decode_worker_makes_up_its_own_mind() -> None:
    world = World(warm_world().config, prefill=1, decode=2)
    first, second = (core.peers for core in world.decode.values())
    world.submit(prompt(40), 2)
    world.run()
    peer = first.get(agent_name("prefill-0", 1))
    assert peer is not None
    for _ in range(FAILURES):
        first.breaker(peer).failed(0.0)
    assert not first.breaker(peer).allows(0.0)
    assert second.breaker(peer).allows(0.0)
