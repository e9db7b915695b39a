"""Whose fault a failure is: a worker's, a request's, or nobody's; and what each costs (I8, I11, FAULTS F13)."""

import pytest

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import Blame
from engine.messages import RowError, Step, StepDone
from tests.fakes.answer import Answer
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, finish, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B, expected, prompt

ERRORS = [MemoryError("no memory"), RuntimeError("CUDA out of memory")]


def break_engine(world: World, name: str, error: Exception = ERRORS[0]) -> None:
    """From now on no forward of this worker succeeds."""
    model = world.engines[name].stepper._model

    class Broken:
        def __getattr__(self, asked: str) -> object:
            return getattr(model, asked)

        def run(self, rows: object, *more: object) -> object:
            raise error

    world.engines[name].stepper._model = Broken()  # type: ignore[assignment]


def blame(answer: Answer) -> "Blame.ValueType":
    return answer.events[-1].failed.blame


def failures(world: World, prefill: str, decode: str = "decode-0") -> int:
    """What the breaker of this pair has counted."""
    peer = world.decode[decode].peers.get(agent_name(prefill, 1))
    assert peer is not None
    return world.decode[decode].peers.breaker(peer).failures


def hold_back(world: World, lane: str) -> None:
    """Deliver everything but what waits for this worker's engine."""
    while ready := [name for name, queue in world.queues.items() if queue and name != lane]:
        world.queues[world.random.choice(ready)].popleft()()


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "cuda"])
def test_what_one_prefill_worker_cannot_run_is_left_to_the_next_and_counts_against_it(error: Exception) -> None:
    world = warm_world()
    break_engine(world, "prefill-0", error)
    answer = finish(world, submit(world))
    assert answer.prefill_on == ["prefill-0", "prefill-1"]
    assert (failures(world, "prefill-0"), failures(world, "prefill-1")) == (1, 0)


def test_a_prefill_worker_that_can_run_nothing_is_not_tried_by_every_request() -> None:
    world = warm_world()
    break_engine(world, "prefill-0")
    asked = []
    for number in range(8):
        ids = prompt(6 * B + 5, number)
        attempt = world.submit(ids, 8, ignore_eos=True)
        world.run(check=True)
        world.wait(0.1)
        assert world.answers[attempt].tokens[0] == expected(ids, 8)
        asked.append(world.answers[attempt].prefill_on[0])
    assert asked[:3] == ["prefill-0"] * 3
    assert "prefill-1" in asked
    assert world.decode["decode-0"].state.counters["breaker_opened"] >= 1


def test_what_both_prefill_workers_cannot_run_is_computed_here() -> None:
    world = warm_world()
    break_engine(world, "prefill-0")
    break_engine(world, "prefill-1")
    answer = finish(world, submit(world))
    assert answer.prefill_on == ["prefill-0", "prefill-1", "local"]
    assert (failures(world, "prefill-0"), failures(world, "prefill-1")) == (1, 1)


def test_what_nobody_can_run_counts_against_nobody() -> None:
    """It may be the request: it must not take the workers from others (I8)."""
    world = warm_world()
    for name in world.engines:
        break_engine(world, name)
    attempt = submit(world)
    world.run(check=True)
    world.wait(8)
    answer = world.answers[attempt]
    assert answer.prefill_on == ["prefill-0", "prefill-1", "local"]
    assert answer.lost == "failed: MemoryError: no memory"
    assert blame(answer) == Blame.BLAME_UNSETTLED
    assert (failures(world, "prefill-0"), failures(world, "prefill-1")) == (0, 0)
    world.assert_quiet()


@pytest.mark.parametrize("refused", [True, False])
def test_a_refused_row_is_the_requests_fault_and_one_that_cannot_be_run_may_be(refused: bool) -> None:
    world = warm_world()
    run = world.engines["prefill-0"].stepper.run

    def refuse(step: Step) -> StepDone:
        done = run(step)
        errors = dict.fromkeys(range(len(step.rows)), RowError("no", refused))
        return StepDone(done.plan, done.samples, [], errors, done.seconds)

    world.engines["prefill-0"].stepper.run = refuse  # type: ignore[method-assign]
    attempt = submit(world)
    world.run(check=True)
    world.wait(8)
    answer = world.answers[attempt]
    if refused:
        assert (answer.lost, answer.prefill_on) == ("failed: no", ["prefill-0"])
        assert blame(answer) == Blame.BLAME_REQUEST
    else:
        assert answer.tokens[0] == expected(IDS, 20)
    assert failures(world, "prefill-0") == (0 if refused else 1)
    world.assert_quiet()


def test_deadlines_of_clients_open_no_breaker() -> None:
    """The prefill worker's tick comes before the decode worker's, which it does every other time."""
    world = warm_world()
    core = world.decode["decode-0"]
    for number in range(5):
        attempt = world.submit(prompt(6 * B + 5, number), 8, prefill=["prefill-0"], deadline_s=0.3)
        hold_back(world, ">prefill-0:main")  # its engine is at work on the prompt
        world.clock.advance(0.31)
        world.prefill["prefill-0"].tick(world.clock.now())
        world._prefill_effects("prefill-0")
        hold_back(world, ">prefill-0:main")
        answer = world.answers[attempt]
        assert answer.lost == "failed: deadline exceeded"
        assert blame(answer) == Blame.BLAME_DEADLINE
        assert answer.prefill_on == ["prefill-0"], "it was computed elsewhere after its deadline"
        core.tick(world.clock.now())
        world._decode_effects("decode-0")
        world.run()
    assert core.state.counters["breaker_opened"] == 0
    assert failures(world, "prefill-0") == 0
