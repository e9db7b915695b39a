"""What goes wrong between a prefill worker and a decode worker: caught, counted under its own reason, tokens right."""

import numpy as np
import pytest

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import Blame, WorkerAddress
from cluster.stubs.link_pb2 import FromPrefill, JobFailed, JobRefused
from cluster.stubs.session_pb2 import CancelAttempt, FromRouter, RouterHello
from decode_worker.attempts import Phase
from engine.messages import Copy, Fatal, Read, ReadFailed, RowError, StepDone
from tests.fakes.answer import Answer
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt

IDS = prompt(6 * B + 5)


def run_until(world: World, lane: str, count: int = 1) -> None:
    """Deliver messages until `count` more wait in the queue of that name, and leave them there."""
    for _ in range(10_000):
        if len(world.queues[lane]) >= count:
            return
        ready = [name for name, queue in world.queues.items() if queue and name != lane]
        assert ready, f"nothing moves, and {lane} has {len(world.queues[lane])} messages"
        world.queues[world.random.choice(ready)].popleft()()
    raise AssertionError("this never ends")


def run_until_still(world: World, lane: str) -> None:
    """Deliver everything but what waits in the queue of that name."""
    while ready := [name for name, queue in world.queues.items() if queue and name != lane]:
        world.queues[world.random.choice(ready)].popleft()()


def finish(world: World, attempt: str, count: int = 20) -> Answer:
    """Run to the end; the tokens must be right and everything free again."""
    world.run(check=True)
    answer = world.answers[attempt]
    if not answer.ends:
        world.wait(8)
    assert answer.tokens[0] == expected(IDS, count)
    assert answer.ends == {0: "length"}
    world.wait(8)
    world.assert_quiet()
    return answer


def counters(world: World, name: str = "decode-0") -> dict[str, int]:
    core = world.decode[name].state if name in world.decode else world.prefill[name]
    return dict(core.counters)


def warm_world(seed: int = 0) -> World:
    """Two prefill workers, whose links are up and warm."""
    world = World(config(chunk_tokens=32), prefill=2, seed=seed)
    world.decode["decode-0"].warm([WorkerAddress(worker=p, epoch=1, address=p) for p in world.prefill])
    world._decode_effects("decode-0")
    world.run()
    return world


@pytest.fixture
def world() -> World:
    return warm_world()


def submit(world: World) -> str:
    return world.submit(IDS, 20, ignore_eos=True)


def test_a_bit_flipped_in_the_holders_memory_after_the_offer(world: World) -> None:
    attempt = submit(world)
    run_until_still(world, ">decode-0:wire")
    world.engines["prefill-0"].memory.pool[:, 5] ^= 1
    finish(world, attempt)
    assert counters(world)["digest_mismatch"] > 0
    assert counters(world, "prefill-0")["block_corrupt"] > 0


def test_a_bit_flipped_on_the_way_is_read_once_more_from_the_same_holder(world: World) -> None:
    attempt = submit(world)
    run_until(world, "decode-0:wire>")
    world.engines["decode-0"].memory.staging[:, 3] ^= 8
    answer = finish(world, attempt)
    assert counters(world)["digest_mismatch"] > 0
    assert answer.handed_off.recomputed_tokens == 0
    assert "block_corrupt" not in counters(world, "prefill-0")


def test_a_bit_flipped_between_copy_and_proof_changes_nothing(world: World) -> None:
    """The digest is of the copy: what happens to the slot afterwards is of no interest."""
    attempt = submit(world)
    run_until(world, "decode-0:main>", 1)
    world.engines["decode-0"].memory.staging[:] = 7
    finish(world, attempt)


def test_a_block_evicted_and_overwritten_between_offer_and_read(world: World) -> None:
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 2)  # the answer and an offer wait
    core = world.prefill["prefill-0"]
    for job in list(core.jobs.values()):
        core._leave(job, "pins_expired")
    world.engines["prefill-0"].memory.pool[:] = 9
    finish(world, attempt)
    assert counters(world)["digest_mismatch"] > 0


def test_an_offer_of_other_content_is_refused_before_a_byte_moves(world: World) -> None:
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 2)
    core = world.decode["decode-0"]
    real = core.handoffs.offered

    def lie(offer, peer, now):  # type: ignore[no-untyped-def]
        for block in offer.blocks:
            block.key = b"x" * 16
        real(offer, peer, now)

    core.handoffs.offered = lie  # type: ignore[method-assign]
    finish(world, attempt)
    assert counters(world)["handoff_left: offered other content"] > 0
    assert counters(world).get("kv_bytes", 0) == 0


@pytest.mark.parametrize("stage", range(0, 60, 3))
def test_the_prefill_worker_dies_at_any_moment(stage: int) -> None:
    world = warm_world(seed=stage)
    attempt = submit(world)
    for _ in range(stage):
        world.step()
    world.kill_prefill("prefill-0")
    finish(world, attempt)


@pytest.mark.parametrize("stage", range(0, 60, 3))
def test_both_prefill_workers_die(stage: int) -> None:
    world = warm_world(seed=stage)
    attempt = submit(world)
    for _ in range(stage):
        world.step()
    world.kill_prefill("prefill-0")
    for _ in range(stage // 2):
        world.step()
    world.kill_prefill("prefill-1")
    finish(world, attempt)


def test_a_holder_that_never_answers_is_left_after_a_while(world: World) -> None:
    attempt = submit(world)
    world.step()
    world.queues["decode-0>prefill-0"].clear()
    world.run()
    assert not world.answers[attempt].ends
    finish(world, attempt)
    assert counters(world)["handoff_left: no offer in time"] == 1
    assert counters(world)["handoffs"] == 1


def test_a_refusal_goes_to_the_next_and_two_refusals_go_back_to_the_router(world: World) -> None:
    for name in ("prefill-0", "prefill-1"):
        world.prefill[name].draining = True
    attempt = submit(world)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.lost.startswith("no_prefill")
    assert "prefill-0: draining; prefill-1: draining" in answer.lost
    world.assert_quiet()
    world.prefill["prefill-1"].draining = False
    finish(world, submit(world))
    assert counters(world)["job_refused"] == 3


def test_a_failed_read_keeps_what_was_verified_and_goes_on_elsewhere(world: World) -> None:
    attempt = submit(world)
    run_until(world, "decode-0:main>", 1)
    core = world.decode["decode-0"]
    for read_id in list(core.handoffs._reads):
        if read_id not in core.handoffs._copying:
            world.queues[">decode-0:wire"].clear()
            core.from_engine(ReadFailed(read_id, "the wire broke"), world.clock.now())
            world._decode_effects("decode-0")
    finish(world, attempt)


def test_a_read_that_never_ends_is_given_up_and_its_slot_stays_out_of_use(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    stuck = world.queues[">decode-0:wire"].pop()
    world.wait(6)
    answer = world.answers[attempt]
    assert answer.tokens[0] == expected(IDS, 20)
    core = world.decode["decode-0"]
    assert core.state.staging.set_aside == 1
    assert counters(world)["read_given_up"] == 1
    stuck()
    world.run(check=True)
    assert core.state.staging.set_aside == 0
    finish(world, attempt)


def test_a_read_that_lands_after_the_cancel_touches_only_its_slot(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    late = world.queues[">decode-0:wire"].pop()
    world.cancel(attempt)
    world.run(check=True)
    before = world.engines["decode-0"].memory.pool.copy()
    late()
    world.run(check=True)
    assert np.array_equal(before, world.engines["decode-0"].memory.pool)
    world.wait(8)
    world.assert_quiet()


def test_a_copy_under_way_keeps_its_blocks_through_a_cancel() -> None:
    """Cancel in mid-copy, then a request that needs every block: the copy may not land in it (FAULTS C02)."""
    world = World(config(pool_tokens=8 * B))
    attempt = submit(world)
    for _ in range(10_000):
        if any("Copy" in repr(c) for c in world.queues[">decode-0:main"]) or world.decode["decode-0"].handoffs._copying:
            break
        world.step()
    held = world.queues[">decode-0:main"].pop()
    world.cancel(attempt)
    again = world.submit(IDS, 20, prefill=[], ignore_eos=True)
    world.run(check=True)
    newcomer = world.decode["decode-0"].state.attempts[again]
    assert newcomer.phase is Phase.WAITING, "the blocks under the copy must not have been given away"
    assert not newcomer.sequences()
    held()
    world.run(check=True)
    assert world.answers[again].tokens[0] == expected(IDS, 20)


def test_a_prefix_block_that_rots_is_noticed_before_use(world: World) -> None:
    finish(world, submit(world))
    for name in ("decode-0", "prefill-0"):
        world.engines[name].memory.pool[:, 8] ^= 4
    finish(world, submit(world))
    assert counters(world)["prefix_hit_corrupt"] > 0
    assert counters(world, "prefill-0")["prefix_hit_corrupt"] > 0


def test_an_invalid_job_fails_the_request_and_is_not_tried_elsewhere(world: World) -> None:
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 1)
    peer = agent_name("prefill-0", 1)
    failed = FromPrefill(failed=JobFailed(attempt=attempt, reason="bad", blame=Blame.BLAME_REQUEST))
    core = world.decode["decode-0"]
    core.from_prefill(peer, failed, world.clock.now())
    world._decode_effects("decode-0")
    world.run()
    assert world.answers[attempt].lost == "failed: bad"
    assert world.answers[attempt].events[-1].failed.blame == Blame.BLAME_REQUEST
    world.wait(8)
    world.assert_quiet()


def test_messages_of_strangers_and_of_the_past_are_ignored(world: World) -> None:
    core = world.decode["decode-0"]
    refused = FromPrefill(refused=JobRefused(attempt="nobody"))
    core.from_prefill("stranger", refused, 0.0)
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 1)
    core.from_prefill(agent_name("prefill-0", 1), refused, 0.0)
    core.from_prefill(agent_name("prefill-1", 1), FromPrefill(refused=JobRefused(attempt=attempt)), 0.0)
    assert finish(world, attempt).prefill_on == ["prefill-0"]


def test_a_router_cannot_touch_the_attempts_of_another(world: World) -> None:
    attempt = submit(world)
    world.step()
    core = world.decode["decode-0"]
    assert core.session_opened("stranger", RouterHello(epoch=99, session=1), 0.0)
    world._decode_effects("decode-0")
    core.from_router("stranger", FromRouter(cancel=CancelAttempt(attempt=attempt)), 0.0)
    core.session_closed("stranger", 0.0)
    finish(world, attempt)


def test_a_lost_session_frees_everything(world: World) -> None:
    submit(world)
    for _ in range(25):
        world.step()
    core = world.decode["decode-0"]
    core.session_closed("router", world.clock.now())
    world._decode_effects("decode-0")
    world.run(check=True)
    world.wait(8)  # nobody comes back for it
    world.assert_quiet()


def test_an_overdue_plan_loses_the_worker() -> None:
    world = World(config())
    submit(world)
    core = world.decode["decode-0"]
    world.submit(IDS, 20, prefill=[], ignore_eos=True)
    run_until(world, ">decode-0:main", 1)
    core.tick(world.clock.now() + 5)
    assert not any(type(e).__name__ == "Lost" for e in core.take_effects())
    core.tick(world.clock.now() + 40)
    lost = [e for e in core.take_effects() if type(e).__name__ == "Lost"]
    assert lost
    assert "overdue" in str(lost[0])


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_worker_that_was_frozen_does_not_blame_others_for_it(world: World, name: str) -> None:
    attempt = submit(world)
    run_until(world, f">{name}:main", 1)
    core = world.decode.get(name) or world.prefill[name]
    world.clock.advance(60)
    core.slept(60)
    core.tick(world.clock.now())
    assert not any(type(e).__name__ == "Lost" for e in core.take_effects())
    assert not world.answers[attempt].lost


def test_reads_and_holders_get_back_the_time_in_which_we_were_frozen(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    core = world.decode["decode-0"]
    world.clock.advance(60)
    core.slept(60)
    core.tick(world.clock.now())
    world._decode_effects("decode-0")
    finish(world, attempt)
    assert counters(world)["handoffs"] == 1
    assert not [name for name in counters(world) if name.startswith(("handoff_left", "read_given_up"))]


def test_an_engine_that_cannot_go_on_loses_the_worker(world: World) -> None:
    core = world.prefill["prefill-0"]
    core.from_engine(Fatal("out of memory"), 0.0)
    assert [getattr(e, "reason", "") for e in core.take_effects()] == ["out of memory"]


def test_a_row_the_engine_refuses_fails_its_request_alone(world: World) -> None:
    bad = world.submit(IDS, 20, prefill=[], ignore_eos=True)
    good = world.submit(IDS[1:], 20, prefill=[], ignore_eos=True)
    engine = world.engines["decode-0"]
    real = engine.stepper.run

    def refuse(step):  # type: ignore[no-untyped-def]
        done = real(step)
        rows = [i for i, row in enumerate(step.rows) if row.tokens and row.tokens[0] == IDS[0] and row.start == 0]
        errors = dict.fromkeys(rows, RowError("refused", refused=True))
        return StepDone(done.plan, done.samples, done.filled, errors, done.seconds)

    engine.stepper.run = refuse  # type: ignore[method-assign]
    world.run(check=True)
    assert world.answers[bad].lost == "failed: refused"
    assert world.answers[good].tokens[0] == expected(IDS[1:], 20)
    world.wait(8)
    world.assert_quiet()


def test_reads_are_posted_while_later_chunks_compute(world: World) -> None:
    """The first blocks move before the last chunk is computed: what overlap is for."""
    order: list[str] = []
    for name in ("decode-0", "prefill-0"):
        engine = world.engines[name]
        real = engine.handle

        def handle(command, real=real, name=name):  # type: ignore[no-untyped-def]
            if isinstance(command, Read | Copy) or (name == "prefill-0" and type(command).__name__ == "Step"):
                order.append(f"{name} {type(command).__name__}")
            return real(command)

        engine.handle = handle  # type: ignore[method-assign]
    finish(world, submit(world))
    first_read, last_step = order.index("decode-0 Read"), len(order) - order[::-1].index("prefill-0 Step")
    assert first_read < last_step


def test_the_next_plan_waits_for_the_copies_that_run_before_it(world: World) -> None:
    """A prompt whose last copy is done joins the very next plan (what a stream pays for it: one message)."""
    other = world.submit(prompt(3, 9), 400, prefill=[], ignore_eos=True)
    while not world.answers[other].tokens[0]:
        world.step()
    submit(world)
    core = world.decode["decode-0"]
    lane = world.queues[">decode-0:main"]
    joined = []
    for _ in range(5_000):
        if core.handoffs.copying and len(lane) == 1 and not core.state.batcher.in_flight:
            before = core.handoffs.active
            lane.popleft()()
            world.queues["decode-0:main>"].popleft()()
            if core.handoffs.active < before:
                joined.append(core.state.batcher.in_flight_tokens)
        elif not world.step():
            break
    assert joined
    assert joined[-1] > 1, "the prompt that was complete is not in the plan that followed"
    world.cancel(other)
    world.run(check=True)
