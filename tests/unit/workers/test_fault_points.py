"""Fault points inside the cores: what they do to a request, and the check that a step's delay was made for."""

import random

import pytest

from cluster.core.config import ClusterConfig
from engine.faults import with_step_faults
from engine.messages import Step, StepDone
from engine.stepper import Stepper
from router.requests import worst_blocks
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt

LENGTH, MOST = 3 * B + 5, B
LOOPS = [100, pytest.param(500, marks=pytest.mark.verify)]


class DelayedStepper(Stepper):
    """The engine's own stepper behind its fault points; a delay takes virtual time."""

    def __init__(self, world: World, name: str) -> None:
        inner = world.engines[name].stepper
        self._disturbed = with_step_faults(inner.run, world.config.faults_of(name), wait=world.clock.advance)

    def run(self, step: Step) -> StepDone:
        return self._disturbed(step)


def with_faults(settings: ClusterConfig, *faults: dict[str, object]) -> ClusterConfig:
    return ClusterConfig.model_validate({**settings.model_dump(), "faults": faults})


def in_mid_step(world: World, rng: random.Random) -> bool:
    """Deliver messages until a step of the decode worker is under way; sometimes the engine has run it already."""
    lane = rng.choice([">decode-0:main", "decode-0:main>"])
    for _ in range(1000):
        batcher = world.decode["decode-0"].state.batcher
        if batcher.in_flight and world.queues[lane]:
            return True
        if not world.step():
            return False
    raise AssertionError("this never ends")


def blocks_of(world: World, attempt: str) -> set[int]:
    """What its sequences on the decode worker hold."""
    known = world.decode["decode-0"].state.attempts.get(attempt)
    return {block for sequence in known.sequences() for block in sequence.blocks} if known else set()


@pytest.mark.parametrize("loops", LOOPS)
def test_cancelled_in_mid_step_and_asked_again_into_a_pool_of_that_size(loops: int) -> None:
    """What the old attempt's step still writes must not meet what the new one owns (I2; poison and tracer show it)."""
    blocks = worst_blocks(LENGTH, 1, MOST, B)
    settings = config(chunk_tokens=B)
    settings = settings.model_copy(
        update={"pools": settings.pools.model_copy(update={"decode": settings.pools.decode.model_copy(
            update={"pool_tokens": blocks * B})})}
    )  # fmt: skip
    delay = {"point": "step.delay", "program": "decode-0", "seconds": 0.05, "probability": 1.0}
    world = World(with_faults(settings, delay), seed=5)
    assert world.decode["decode-0"].state.books.num_blocks == blocks
    world.engines["decode-0"].stepper = DelayedStepper(world, "decode-0")
    books = world.decode["decode-0"].state.books
    rng, interrupted = random.Random(5), 0
    for loop in range(loops):
        split = loop % 2 == 0
        first = world.submit(prompt(LENGTH, 2 * loop), MOST, prefill=None if split else [], ignore_eos=True)
        for _ in range(rng.randrange(30)):
            world.step()
        caught = in_mid_step(world, rng)
        before = world.clock.now()
        held, plan = blocks_of(world, first), books._sent
        world.cancel(first)
        ids = prompt(LENGTH, 2 * loop + 1)
        again = world.submit(ids, MOST, prefill=None if split else [], ignore_eos=True)
        while world.queues["router>decode-0"]:  # at once: nothing else moves before both are there
            world.queues["router>decode-0"].popleft()()
        interrupted += caught and not world.answers[first].ends
        while caught and books._back < plan:
            assert not held & blocks_of(world, again), f"loop {loop}: the plan in flight may still write there"
            assert world.step()
        world.run()
        world.check_integrity()
        assert world.answers[again].tokens[0] == expected(ids, MOST), f"loop {loop}"
        assert world.answers[again].ends == {0: "length"}
        assert world.clock.now() > before + 0.05, "no step was delayed"
    waited = world.decode["decode-0"].state.counters["waited_for_room"]
    assert interrupted > loops // 2
    assert waited > loops // 4, "the pool was never too small for both"
    world.wait(8)
    world.assert_quiet()


def test_a_refused_reservation_makes_an_attempt_wait_its_turn() -> None:
    world = World(with_faults(config(), {"point": "allocate.fail", "program": "decode-0", "nth": 1}))
    attempt = world.submit(prompt(LENGTH), MOST, ignore_eos=True)
    world.run(check=True)
    world.wait(1)
    assert world.answers[attempt].tokens[0] == expected(prompt(LENGTH), MOST)
    assert world.decode["decode-0"].state.counters["waited_for_room"] == 1
    world.wait(6)
    world.assert_quiet()


@pytest.mark.parametrize("seed", range(10))
def test_reservations_that_fail_at_random_change_no_token(seed: int) -> None:
    fault = {"point": "allocate.fail", "probability": 0.2, "seed": seed}
    world = World(with_faults(config(pool_tokens=24 * B, chunk_tokens=32), fault), prefill=2, seed=seed)
    rng = random.Random(seed)
    asked: dict[str, list[int]] = {}
    for number in range(20):
        ids = prompt(rng.randrange(1, 5 * B), 100 * seed + number)
        asked[world.submit(ids, MOST, ignore_eos=True)] = ids
        world.wait(0.1)
    world.wait(5)
    ended = 0
    for attempt, ids in asked.items():
        answer = world.answers[attempt]
        assert answer.tokens[0] == expected(ids, MOST)[: len(answer.tokens[0])]
        assert answer.ends or answer.lost.startswith(("preempted", "no_prefill", "refused")), answer
        ended += bool(answer.ends)
    assert ended > 3
    world.wait(8)
    world.assert_quiet()
