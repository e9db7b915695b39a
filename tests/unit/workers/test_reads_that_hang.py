"""Reads that do not end may cost their holder its work, but never this worker its progress. Found by simulation."""

from cluster.stubs.common_pb2 import WorkerAddress
from kv_transfer.staging import Staging
from prefill_worker.readers import HELP_S, Readers
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, run_until
from tests.unit.workers.test_tracer_matrix import config, expected


def one_slot_world() -> World:
    settings = config(chunk_tokens=32).model_dump(mode="json")
    settings["handoff"]["slots"] = 1
    world = World(type(config()).model_validate(settings), prefill=2)
    world.decode["decode-0"].warm([WorkerAddress(worker=p, epoch=1, address=p) for p in world.prefill])
    world._decode_effects("decode-0")
    world.run()
    return world


def test_a_hand_off_does_not_wait_for_slots_that_its_holder_never_gives_back() -> None:
    """A hand-off waited for a slot until its deadline, because a given-up read of its holder held all it may have."""
    world = one_slot_world()
    first = world.submit(IDS, 20, ignore_eos=True)
    run_until(world, ">decode-0:wire")
    world.queues[">decode-0:wire"].clear()  # this read never ends
    world.cancel(first)
    world.run(check=True)
    assert world.decode["decode-0"].state.staging.set_aside == 1
    second = world.submit(IDS, 20, ignore_eos=True)
    world.run(check=True)
    assert world.answers[second].tokens[0] == expected(IDS, 20)
    assert counters(world)["job_refused"] == 1
    assert counters(world)["handoffs"] == 1, "the other holder gave it all"


def test_a_hand_off_under_way_leaves_a_holder_whose_reads_hold_all_slots() -> None:
    world = one_slot_world()
    first = world.submit(IDS, 20, ignore_eos=True)
    second = world.submit(IDS[1:], 20, ignore_eos=True)
    run_until(world, ">decode-0:wire")
    world.queues[">decode-0:wire"].clear()
    world.cancel(first)
    world.wait(12)
    assert world.answers[second].tokens[0] == expected(IDS[1:], 20)


def test_who_waits_for_a_slot_gets_it_when_a_read_is_given_up() -> None:
    """Two hand-offs share one slot; the read of one hangs. The other went on only when something else happened."""
    world = one_slot_world()
    hangs = world.submit(IDS, 20, ignore_eos=True, prefill=["prefill-0"])
    run_until(world, ">decode-0:wire")
    world.queues[">decode-0:wire"].clear()
    waits = world.submit(IDS[1:], 20, ignore_eos=True, prefill=["prefill-1"])
    world.run(check=True)
    assert not world.answers[waits].ends
    world.wait(config().handoff.read_timeout_s + 0.5)
    assert world.answers[waits].tokens[0] == expected(IDS[1:], 20)
    assert world.answers[hangs].tokens[0] == expected(IDS, 20)
    assert counters(world)["handoffs"] == 1, "what waited came over; what hung was computed here"


def test_the_holder_is_asked_to_poll_until_a_read_that_was_given_up_has_ended() -> None:
    """Over TCP nothing lands until the holder polls; after a cancel it had no job, and the slot stayed set aside."""
    world = one_slot_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_until(world, ">decode-0:wire")
    late = world.queues[">decode-0:wire"].pop()
    world.cancel(attempt)
    world.run(check=True)
    core = world.prefill["prefill-0"]
    assert not core.jobs
    world.wait(0.2)
    assert core._readers._serving
    world.wait(5)
    assert core._readers._serving, "as long as it takes"
    late()
    world.run(check=True)
    world.wait(3)
    assert not core._readers._serving
    world.wait(8)
    world.assert_quiet()


def test_help_lasts_a_while_and_ends_with_the_link() -> None:
    readers = Readers()
    readers.opened("d")
    assert readers.change([], 0.0) is True
    readers.warmed("d", 1.0, needs_polling=True)
    assert readers.change([], 1.0) is None
    assert readers.change([], 1.0 + HELP_S) is False
    readers.warmed("d", 9.0, needs_polling=True)
    assert readers.change([], 9.0) is True
    readers.closed("d")
    assert readers.change([], 9.1) is False


def test_a_peer_is_stuck_when_its_own_reads_or_those_of_others_hold_every_slot() -> None:
    staging = Staging(2)
    assert not staging.stuck("a")
    for peer in ("a", "b"):
        read, _ = staging.start_read(peer) or (0, 0)
        staging.give_up(read)
    assert staging.unended == ["a", "b"]
    assert staging.stuck("a")
    assert not staging.stuck("c")
    read, _ = staging.start_read("c") or (0, 0)
    staging.give_up(read)
    read, _ = staging.start_read("d") or (0, 0)
    assert not staging.stuck("e"), "the read of d will end"
    staging.give_up(read)
    assert staging.stuck("e")
