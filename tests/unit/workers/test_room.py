"""Who gets room on a decode worker, who waits, who has to go, and what a cancel gives back (I7, DESIGN §6)."""

from decode_worker.attempts import Phase
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, run_until, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt


def phases(world: World) -> dict[str, Phase]:
    return {attempt.id: attempt.phase for attempt in world.decode["decode-0"].state.attempts.values()}


def test_who_waits_for_room_is_not_passed_by_a_smaller_newcomer() -> None:
    """Else a large prompt would wait as long as small ones keep coming."""
    world = World(config(pool_tokens=12 * B), prefill=0)
    running = world.submit(prompt(8 * B, 1), 3 * B, ignore_eos=True)
    large = world.submit(prompt(8 * B, 2), 3 * B, waited_s=1.0, ignore_eos=True)
    small = world.submit(prompt(B - 5, 3), 5, ignore_eos=True)
    while world.queues["router>decode-0"]:
        world.step()
        world.check_integrity()
    assert phases(world) == {running: Phase.PREFILLING, large: Phase.WAITING, small: Phase.WAITING}
    world.run(check=True)
    for attempt, ids, count in ((running, prompt(8 * B, 1), 3 * B), (small, prompt(B - 5, 3), 5)):
        assert world.answers[attempt].tokens[0] == expected(ids, count)
    assert counters(world)["waited_for_room"] == 2


def test_the_youngest_is_pre_empted_and_never_one_that_is_protected() -> None:
    """Arrival is the request's, not the attempt's: who waited elsewhere before is older. Twice pre-empted is enough."""
    world = World(config(pool_tokens=14 * B), prefill=0)
    asked = {
        world.submit(prompt(2 * B, 1), 60, ignore_eos=True, waited_s=5.0): 1,
        world.submit(prompt(2 * B, 2), 60, ignore_eos=True, waited_s=3.0): 2,
        world.submit(prompt(2 * B, 3), 60, ignore_eos=True, waited_s=1.0, preemptions=2): 3,
    }
    world.run(check=True)
    oldest, young, protected = asked
    assert world.answers[young].lost.startswith("preempted")
    for attempt in (oldest, protected):
        assert not world.answers[attempt].lost
        assert world.answers[attempt].tokens[0] == expected(prompt(2 * B, asked[attempt]), 60)
    assert counters(world)["preempted"] == 1
    world.assert_quiet()


def test_a_cancel_reaches_the_prefill_worker_at_once() -> None:
    world = warm_world()
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 2)
    assert world.prefill["prefill-0"].jobs
    world.cancel(attempt)
    world.run(check=True)
    assert not world.prefill["prefill-0"].jobs
    assert counters(world, "prefill-0")["jobs_cancelled"] == 1
    assert world.answers[attempt].tokens[0] == expected(IDS, 20)[: len(world.answers[attempt].tokens[0])]
    world.assert_quiet()
