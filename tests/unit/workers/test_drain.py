"""Workers that leave in order (FAULTS F14): nothing new, what runs ends or is handed over, no token lost or doubled."""

import pytest

from cluster.stubs.session_pb2 import SampleState
from decode_worker.attempts import Phase
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, finish, warm_world
from tests.unit.workers.test_tracer_matrix import SEEDED, B, config, expected, prompt

MOMENTS = range(0, 150, 6)  # messages delivered before it happens; the whole request takes about 120
COUNT = 30


def some_steps(world: World, moment: int) -> None:
    for _ in range(moment):
        world.clock.advance(0.001)
        world.step()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_decode_worker_hands_over_at_any_moment_and_another_goes_on(moment: int, n: int) -> None:
    world = World(config(chunk_tokens=32), prefill=1, decode=2, seed=moment)
    first = world.submit(IDS, COUNT, n=n, sampling=SEEDED, ignore_eos=True)
    some_steps(world, moment)
    leaver = world.decode["decode-0"]
    arrived = bool(leaver.state.attempts)
    leaver.drain(world.clock.now())
    leaver.hand_over(world.clock.now())
    assert not leaver.state.attempts
    assert leaver.next_flush(world.clock.now()) is None
    world._decode_effects("decode-0")
    world.run(check=True)
    begun = world.answers[first]
    if len(begun.ends) == n:
        return
    assert begun.lost.startswith("preempted" if arrived else "refused")
    assert not arrived or begun.events[-1].preempted.draining
    histories = [SampleState(emitted=begun.tokens[i], finished=i in begun.ends) for i in range(n)]
    second = world.submit(IDS, COUNT, decode="decode-1", n=n, histories=histories, sampling=SEEDED, ignore_eos=True)
    world.run(check=True)
    for index in range(n):
        whole = begun.tokens[index] + world.answers[second].tokens[index]
        assert whole == expected(IDS, COUNT, SEEDED, index)
    world.wait(8)
    world.assert_quiet()


def test_what_runs_on_a_draining_decode_worker_goes_on_to_its_end_and_nothing_new_begins() -> None:
    world = warm_world()
    running = world.submit(IDS, 20, ignore_eos=True)
    some_steps(world, 20)
    world.decode["decode-0"].drain(world.clock.now())
    assert world.decode["decode-0"].status().draining
    late = world.submit(IDS, 20, ignore_eos=True)
    finish(world, running)
    assert world.answers[late].lost == "refused: draining"
    assert "handed_over" not in counters(world)


def test_who_waits_for_room_on_a_draining_decode_worker_is_sent_elsewhere_at_once() -> None:
    world = World(config(pool_tokens=12 * B), decode=1)
    both = [world.submit(prompt(8 * B, seed), 3 * B, ignore_eos=True) for seed in (1, 2)]
    while not any(a.phase is Phase.WAITING for a in world.decode["decode-0"].state.attempts.values()):
        assert world.step()
    world.decode["decode-0"].drain(world.clock.now())
    world._decode_effects("decode-0")
    world.run(check=True)
    lost = [world.answers[attempt].lost for attempt in both]
    assert sorted(lost) == ["", "refused: draining"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_draining_prefill_worker_finishes_its_jobs_and_waits_until_they_are_taken(moment: int) -> None:
    world = warm_world(seed=moment)
    attempt = world.submit(IDS, 20, ignore_eos=True)
    some_steps(world, moment)
    leaver = world.prefill["prefill-0"]
    accepted = counters(world, "prefill-0").get("jobs_accepted", 0)
    leaver.draining = True
    finish(world, attempt)
    assert not leaver.jobs
    assert counters(world, "prefill-1").get("jobs_accepted", 0) == 1 - accepted
    assert counters(world, "prefill-0").get("jobs_taken", 0) == accepted


@pytest.mark.parametrize("moment", MOMENTS)
def test_jobs_that_a_prefill_worker_gives_up_go_on_elsewhere_from_what_is_verified(moment: int) -> None:
    world = warm_world(seed=moment)
    attempt = world.submit(IDS, 20, ignore_eos=True)
    some_steps(world, moment)
    leaver = world.prefill["prefill-0"]
    leaver.draining = True
    leaver.hand_over(world.clock.now())
    assert not leaver.jobs
    world._prefill_effects("prefill-0")
    finish(world, attempt)
    left = {name for name in counters(world) if name.startswith("handoff_left")}
    assert left <= {"handoff_left: job failed"}, "it was told, and did not find out in time"


def test_a_prefill_worker_that_gives_up_a_job_says_so() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    while not world.queues[">decode-0:wire"]:
        assert world.step()
    leaver = world.prefill["prefill-0"]
    leaver.draining = True
    leaver.hand_over(world.clock.now())
    world._prefill_effects("prefill-0")
    while world.queues["prefill-0>decode-0"]:
        world.queues["prefill-0>decode-0"].popleft()()
    assert counters(world)["handoff_left: job failed"] == 1
    assert finish(world, attempt).prefill_on[-1] == "prefill-1"
