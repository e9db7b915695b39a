"""Ways in which other split servers leak, wedge or go on for nobody, tried here (docs/faults.md, R01 to R15)."""

from collections import Counter
from collections.abc import Callable

import pytest

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, Job, JobAccepted
from cluster.stubs.session_pb2 import FromRouter, SampleState
from decode_worker.attempts import Phase
from decode_worker.core import DecodeCore
from prefill_worker.core import PrefillCore
from tests.fakes.books import weight
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, finish, run_until_still, submit, warm_world
from tests.unit.workers.test_faults_correctness import FULL, phase, small_pools
from tests.unit.workers.test_hostile_peers import BAD_SUBMITS, good_submit
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt

# -- R01: the peer whose word would free the blocks is dead -----------------------------------------------------------


@pytest.mark.parametrize("first", ["cancel", "kill"])
@pytest.mark.parametrize("moment", range(0, 80, 5))
def test_cancelled_in_the_second_in_which_prefill_dies(moment: int, first: str) -> None:
    world = warm_world(seed=moment)
    attempt = submit(world)
    for _ in range(moment):
        world.step()
    if first == "cancel":
        world.cancel(attempt)
        world.queues["router>decode-0"].pop()()
        world.kill_prefill("prefill-0")
    else:
        world.kill_prefill("prefill-0")
        world.cancel(attempt)
    world.run(check=True)
    core = world.decode["decode-0"]
    assert not {k: v for k, v in core.status().gauges.items() if v and k != "slots_set_aside"}, "at once, not in time"
    finish(world, submit(world))


# -- R02: refused before it was admitted ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD_SUBMITS)
def test_what_decode_refuses_never_reached_a_prefill_worker(kind: str) -> None:
    world = warm_world()
    core = world.decode["decode-0"]
    core.from_router("router", FromRouter(submit=good_submit(**BAD_SUBMITS[kind])), world.clock.now())
    world._decode_effects("decode-0")
    assert not world.queues["decode-0>prefill-0"]
    assert not world.queues["decode-0>prefill-1"]


def test_the_same_without_its_fault_does_reach_a_prefill_worker() -> None:
    world = warm_world()
    core = world.decode["decode-0"]
    core.from_router("router", FromRouter(submit=good_submit()), world.clock.now())
    world._decode_effects("decode-0")
    assert len(world.queues["decode-0>prefill-0"]) == 1
    world.run(check=True)
    assert counters(world, "prefill-0")["jobs_accepted"] == 1


# -- R04: nothing to read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, 4 * B + 1])
def test_a_hand_off_of_no_block_is_let_go_at_once(length: int) -> None:
    """Decode has every full block, or there is none: the prefill worker draws a token, and waits for nobody's word."""
    world = warm_world()
    ids = prompt(length)
    if length > B:
        world.submit(ids, 1, prefill=[], ignore_eos=True)
        world.run()
    attempt = world.submit(ids, 20, ignore_eos=True)
    world.run(check=True)
    assert world.answers[attempt].tokens[0] == expected(ids, 20)
    of_prefill = counters(world, "prefill-0")
    assert of_prefill["jobs_accepted"] == of_prefill["jobs_taken" if length == B else "jobs_nothing_offered"] == 1
    assert counters(world).get("kv_blocks_verified", 0) == (1 if length == B else 0)
    world.assert_quiet()  # before any pin could have expired


# -- R05: a cancel in every state -------------------------------------------------------------------------------------


def reading(world: World, attempt: str) -> bool:
    return bool(world.decode["decode-0"].state.staging.in_use) and not copying(world, attempt)


def copying(world: World, attempt: str) -> bool:
    return bool(world.decode["decode-0"].handoffs.copying)


def in_phase(wanted: Phase) -> Callable[[World, str], bool]:
    return lambda world, attempt: phase(world, attempt) is wanted


def step_in_flight(world: World, attempt: str) -> bool:
    return phase(world, attempt) is Phase.DECODING and world.decode["decode-0"].state.batcher.in_flight


STATES: dict[str, Callable[[World, str], bool]] = {
    **{wanted.name.lower(): in_phase(wanted) for wanted in Phase},
    "reading": reading,
    "copying": copying,
    "in mid-step": step_in_flight,
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", STATES)
def test_a_cancel_in_this_state_leaves_nothing_behind(state: str, n: int) -> None:
    """And a small request that comes at once is answered (R09)."""
    world = World(small_pools(decode=FULL + 4), prefill=2)
    if state == "waiting":
        world.submit(prompt(len(IDS), 1), 2 * B, ignore_eos=True)
    if state == "checking":
        world.submit(IDS, 1, prefill=[], ignore_eos=True)
        world.run()
    remote: list[str] | None = [] if state == "prefilling" else None
    attempt = world.submit(IDS, 20 if n == 1 else 2, n=n, prefill=remote, ignore_eos=True)
    for _ in range(5000):
        if STATES[state](world, attempt):
            break
        assert world.step(), f"{state} never came"
    for _ in range(2):
        world.cancel(attempt)
        world.queues["router>decode-0"].pop()()
    world.decode["decode-0"].check_integrity()
    assert attempt not in world.decode["decode-0"].state.attempts
    small = world.submit(prompt(5, 2), 5, ignore_eos=True)
    world.run(check=True)
    world.wait(0.5)
    assert world.answers[small].tokens[0] == expected(prompt(5, 2), 5)
    got = world.answers[attempt].tokens[0]
    assert got == expected(IDS, 20)[: len(got)]
    world.wait(8)
    world.assert_quiet()


# -- R07: everybody holds blocks, nobody runs -------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", range(9, 15))
def test_two_hand_offs_that_fill_the_pool_both_end(blocks: int) -> None:
    """Each needs more to go on than the other leaves. The younger one gives way, and its tokens are kept."""
    world = World(small_pools(decode=blocks), prefill=2, seed=blocks)
    asked = {world.submit(prompt(4 * B, seed), 4 * B, ignore_eos=True): (seed, list[int]()) for seed in (1, 2)}
    done: dict[int, list[int]] = {}
    for round_ in range(1, 20):
        world.run(check=True)
        for attempt, (seed, before) in list(asked.items()):
            answer = world.answers[attempt]
            tokens = before + answer.tokens[0]
            if answer.ends:
                done[seed] = tokens
                del asked[attempt]
            elif answer.lost:
                assert answer.lost.startswith("preempted"), answer.lost
                del asked[attempt]
                histories = [SampleState(emitted=tokens)]
                again = world.submit(
                    prompt(4 * B, seed), 4 * B, histories=histories, ignore_eos=True, preemptions=round_
                )
                asked[again] = (seed, tokens)
        if not asked:
            break
    assert done == {seed: expected(prompt(4 * B, seed), 4 * B) for seed in (1, 2)}
    world.wait(8)
    world.assert_quiet()


def test_the_youngest_gives_way_while_it_is_being_handed_over() -> None:
    """The older one writes and needs a block; all others are under a hand-off whose job is lost on the way."""
    world = World(small_pools(decode=10))
    world.submit(prompt(B), 1, ignore_eos=True)
    world.run()  # the link is up
    older = world.submit(prompt(4 * B, 1), 4 * B, prefill=[], ignore_eos=True)
    while phase(world, older) is not Phase.DECODING:
        assert world.step()
    younger = world.submit(prompt(3 * B, 2), 4 * B, ignore_eos=True)
    world.queues["router>decode-0"].pop()()
    assert phase(world, younger) is Phase.HANDING_OFF
    assert phase(world, older) is Phase.DECODING
    world.queues["decode-0>prefill-0"].clear()
    world.run(check=True)
    assert world.answers[younger].lost.startswith("preempted")
    assert not world.answers[older].lost
    assert world.answers[older].tokens[0] == expected(prompt(4 * B, 1), 4 * B)
    world.wait(8)
    world.assert_quiet()


# -- R09, R13: work for nobody ----------------------------------------------------------------------------------------


def test_a_prompt_that_nobody_waits_for_any_more_is_not_read_to_its_end() -> None:
    world = warm_world()
    attempt = world.submit(prompt(100 * B), 20, ignore_eos=True)
    while counters(world, "prefill-0").get("steps", 0) < 3:
        world.step()
    world.cancel(attempt)
    while world.queues["router>decode-0"] or world.queues["decode-0>prefill-0"]:
        for lane in ("router>decode-0", "decode-0>prefill-0"):
            while world.queues[lane]:
                world.queues[lane].popleft()()
    steps = counters(world, "prefill-0")["steps"]
    assert not world.prefill["prefill-0"].jobs
    world.run(check=True)
    assert counters(world, "prefill-0")["steps"] <= steps + 1, "the step that was under way, and no other"
    finish(world, submit(world))


def test_a_stream_that_nobody_reads_any_more_stops_within_a_step() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 400, ignore_eos=True)
    while counters(world).get("steps", 0) < 10:
        world.step()
    world.cancel(attempt)
    world.queues["router>decode-0"].pop()()
    steps = counters(world).get("steps", 0)
    world.run(check=True)
    assert counters(world)["steps"] <= steps + 1
    assert counters(world)["attempts_cancelled"] == 1


# -- R11: one hold that lives shields no other ------------------------------------------------------------------------


def test_pins_end_each_in_its_own_time_whatever_came_before() -> None:
    """The first job in line is the last to be done: those behind it must not wait for it."""
    world = World(config(chunk_tokens=B))
    core = world.prefill["prefill-0"]
    core.link_opened("decode-9", world.decode["decode-0"].state.facts.identity, 0.0)
    core.take_effects()
    greedy = Sampling(top_p=1.0, logprobs=-1)
    lengths = {"long": 60 * B, **{f"short {i}": 2 * B for i in range(6)}}
    for number, (name, length) in enumerate(lengths.items()):
        job = Job(attempt=name, tokens=prompt(length, number), sample_indices=[0], sampling=greedy, deadline_s=600.0)
        core.from_decode("decode-9", FromDecodePeer(job=job), world.clock.now())
    jobs = core.jobs

    def compute(until: Callable[[], bool]) -> None:
        while not until():
            for effect in core.take_effects():
                command = getattr(effect, "command", None)
                report = command and world.engines["prefill-0"].handle(command)
                if report is not None:
                    core.from_engine(report, world.clock.now())

    compute(lambda: all(job.pinned_until for job in jobs.values() if job.message.attempt != "long"))
    assert len(jobs) == 7
    assert next(iter(jobs.values())).message.attempt == "long"
    world.clock.advance(5.1)
    core.tick(world.clock.now())
    assert [job.message.attempt for job in jobs.values()] == ["long"]
    assert core.counters["jobs_pins_expired"] == 6


# -- R14: books that only grow ----------------------------------------------------------------------------------------


def test_no_book_of_a_worker_grows_with_the_requests_it_has_served() -> None:
    world = World(small_pools(prefill=24, decode=24), prefill=2)
    cores: list[DecodeCore | PrefillCore] = [*world.decode.values(), *world.prefill.values()]
    engines = list(world.engines.values())

    def serve(first: int, count: int) -> int:
        for number in range(first, first + count):
            attempt = world.submit(prompt(20 + 7 * number % 90, number), 10, n=1 + number % 2, ignore_eos=True)
            if number % 5 == 0:
                for _ in range(number % 40):
                    world.step()
                world.cancel(attempt)
            world.run()
        world.wait(8)
        world.assert_quiet()
        for core in cores:  # what the watch would have published
            (core.state.books if isinstance(core, DecodeCore) else core.books).take_events()
        return sum(weight(thing) for thing in (*cores, *[engine.stepper for engine in engines]))

    before = serve(0, 60)
    assert before > 100
    assert serve(60, 120) <= before + 20, "a last block table that goes with the next plan may stay"


# -- R15: who is slow is not dead -------------------------------------------------------------------------------------


def test_a_holder_that_says_how_long_it_will_take_is_given_that_time() -> None:
    world = warm_world()
    attempt, core = submit(world), world.decode["decode-0"]
    run_until_still(world, ">prefill-0:main")
    accepted = FromPrefill(accepted=JobAccepted(attempt=attempt, eta_s=10.0))
    core.from_prefill(agent_name("prefill-0", 1), accepted, world.clock.now())
    for _ in range(290):
        world.clock.advance(0.1)
        core.tick(world.clock.now())
    assert not [name for name in counters(world) if name.startswith("handoff_left")]
    finish(world, attempt)
    assert counters(world)["handoffs"] == 1


def test_waiting_for_room_counts_against_nobody() -> None:
    """A burst of many times what fits: all are served in turn, and no link or holder is given up."""
    world = World(small_pools(decode=2 * FULL + 4), prefill=2)
    asked = [prompt(len(IDS), seed) for seed in range(32)]
    waiting, served = list(asked), Counter[str]()
    running: dict[str, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < 8:
            ids = waiting.pop()
            running[world.submit(ids, 5, ignore_eos=True)] = ids
        world.run(check=True)
        world.wait(1)
        for attempt, ids in list(running.items()):
            assert not world.answers[attempt].lost
            if world.answers[attempt].ends:
                assert world.answers[attempt].tokens[0] == expected(ids, 5)
                served["ok"] += 1
                del running[attempt]
    assert served["ok"] == 32
    assert counters(world)["waited_for_room"] > 10
    assert not [name for name in counters(world) if name.startswith("handoff_left")]
