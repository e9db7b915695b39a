"""Whatever goes wrong with a range is counted under a name of its own, in the worker's status, and no token is wrong.

The names are listed in docs/faults.md. Every wanted block ends in exactly one way: `ends` reads it off the counters.
"""

import pytest

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import WorkerAddress
from cluster.stubs.link_pb2 import FromPrefill, Offer, OfferedBlock
from decode_worker.peers import Peer
from engine.messages import ReadFailed
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, finish, run_until, run_until_still, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B

REASONS = {
    "offer_wrong_key", "offer_out_of_range", "offer_repeated", "offer_out_of_order", "offer_late", "read_failed",
    "read_given_up", "read_late", "copy_late", "digest_mismatch", "kv_blocks_reread", "kv_blocks_stale",
    "kv_blocks_corrupt", "kv_blocks_recomputed", "kv_blocks_refused", "kv_blocks_abandoned", "word_of_a_lost_link",
    "prefix_hit_corrupt",
}  # fmt: skip
FULL = len(IDS) // B


@pytest.fixture
def world() -> World:
    return warm_world()


def status(world: World, name: str = "decode-0") -> dict[str, int]:
    """The counters as a router hears them."""
    core = world.decode.get(name) or world.prefill[name]
    return dict(core.status().counters)


def reasons(world: World) -> set[str]:
    """What went wrong on the decode worker, in our own words."""
    return {name for name, count in status(world).items() if count and name in REASONS}


def check_ends(world: World) -> None:
    """Every block that a hand-off wanted is verified, recomputed, refused or abandoned, once nothing is under way."""
    counted = status(world)
    of = {name: counted.get(f"kv_blocks_{name}", 0) for name in
          ("wanted", "behind_a_gap", "distrusted", "verified", "recomputed", "refused", "abandoned")}  # fmt: skip
    here = of["verified"] - of["distrusted"] - of["behind_a_gap"]
    assert of["wanted"] == here + of["recomputed"] + of["refused"] + of["abandoned"], of


def change_offers(world: World, change) -> None:  # type: ignore[no-untyped-def]
    """`change(real, offer, peer, now)` stands between the link and the decode worker's hand-offs."""
    handoffs = world.decode["decode-0"].handoffs
    real = handoffs.offered
    handoffs.offered = lambda *said: change(real, *said)  # type: ignore[method-assign]


def tell(world: World, peer: str, message: FromPrefill) -> None:
    world.decode["decode-0"].from_prefill(peer, message, world.clock.now())
    world._decode_effects("decode-0")


def test_nothing_is_counted_when_nothing_goes_wrong(world: World) -> None:
    finish(world, submit(world))
    assert not reasons(world)
    assert status(world)["kv_blocks_wanted"] == status(world)["kv_blocks_verified"] == FULL
    check_ends(world)


def test_a_bit_flipped_on_the_way_is_a_mismatch_and_read_once_more(world: World) -> None:
    attempt = submit(world)
    run_until(world, "decode-0:wire>")
    world.engines["decode-0"].memory.staging[:, 3] ^= 8
    finish(world, attempt)
    assert reasons(world) == {"digest_mismatch", "kv_blocks_reread"}
    assert status(world)["kv_blocks_reread"] == status(world)["digest_mismatch"]
    assert status(world, "prefill-0")["block_vouched_for"] == status(world)["digest_mismatch"]
    check_ends(world)


def test_a_bit_that_flips_on_every_way_is_corruption_and_the_next_holder_serves(world: World) -> None:
    attempt = submit(world)
    engine = world.engines["decode-0"]
    land = engine.land

    def bent(slot: int, at: int, parts: object) -> None:
        land(slot, at, parts)  # type: ignore[arg-type]
        if "prefill-1" not in world.answers[attempt].prefill_on:
            engine.memory.staging[slot, 3] ^= 8

    engine.land = bent  # type: ignore[assignment, method-assign]
    answer = finish(world, attempt)
    assert answer.prefill_on == ["prefill-0", "prefill-1"]
    assert reasons(world) >= {"digest_mismatch", "kv_blocks_reread", "kv_blocks_corrupt"}
    assert "kv_blocks_stale" not in reasons(world)
    assert status(world)["handoff_left: sent corrupt blocks"] == 1
    check_ends(world)


def test_a_bit_flipped_in_the_holders_memory_is_corruption_there(world: World) -> None:
    attempt = submit(world)
    run_until_still(world, ">decode-0:wire")
    world.engines["prefill-0"].memory.pool[:, 5] ^= 1
    finish(world, attempt)
    assert status(world, "prefill-0")["block_corrupt"] > 0
    assert "block_stale" not in status(world, "prefill-0")
    assert reasons(world) >= {"digest_mismatch", "kv_blocks_corrupt"}
    assert "kv_blocks_stale" not in reasons(world)
    check_ends(world)


def evict_everything(world: World, name: str) -> None:
    """The offered blocks lose their pins, and other prompts take every block of the pool."""
    core = world.prefill[name]
    for job in list(core.jobs.values()):
        core._leave(job, "pins_expired")
    taken = core.books.allocate(core.books.available, "another prompt")
    assert taken
    world.engines[name].memory.pool[taken] = 9
    core.books.release(taken, "another prompt")


def test_a_block_evicted_and_overwritten_between_offer_and_read_is_stale(world: World) -> None:
    attempt = submit(world)
    run_until_still(world, ">decode-0:wire")
    assert not world.prefill["prefill-0"].batcher.in_flight
    evict_everything(world, "prefill-0")
    finish(world, attempt)
    assert reasons(world) >= {"digest_mismatch", "kv_blocks_stale"}
    assert status(world, "prefill-0")["block_stale"] > 0
    assert "block_corrupt" not in status(world, "prefill-0")
    check_ends(world)


def test_wrong_keys_with_right_digests_are_refused_before_a_byte_moves(world: World) -> None:
    def lie(real, offer: Offer, peer: Peer, now: float) -> None:  # type: ignore[no-untyped-def]
        keys = [block.key for block in offer.blocks]
        for block, key in zip(offer.blocks, keys[1:] + keys[:1] if len(keys) > 1 else [bytes(16)], strict=True):
            block.key = key
        real(offer, peer, now)

    change_offers(world, lie)
    finish(world, submit(world))
    assert reasons(world) == {"offer_wrong_key", "kv_blocks_recomputed"}
    assert status(world)["offer_wrong_key"] == 2, "each of the two holders once"
    assert status(world)["kv_blocks_recomputed"] == FULL
    assert "kv_bytes" not in status(world)
    check_ends(world)


def test_a_range_that_lies_outside_the_prompt(world: World) -> None:
    def lie(real, offer: Offer, peer: Peer, now: float) -> None:  # type: ignore[no-untyped-def]
        offer.first_position += 1
        real(offer, peer, now)

    change_offers(world, lie)
    finish(world, submit(world))
    assert reasons(world) == {"offer_out_of_range", "kv_blocks_recomputed"}
    check_ends(world)


def test_a_range_offered_twice(world: World) -> None:
    def twice(real, offer: Offer, peer: Peer, now: float) -> None:  # type: ignore[no-untyped-def]
        real(offer, peer, now)
        real(offer, peer, now)

    change_offers(world, twice)
    finish(world, submit(world))
    assert reasons(world) == {"offer_repeated"}
    assert status(world)["offer_repeated"] == status(world)["kv_blocks_verified"] == FULL
    check_ends(world)


def test_ranges_offered_out_of_order(world: World) -> None:
    held: list[Offer] = []

    def backwards(real, offer: Offer, peer: Peer, now: float) -> None:  # type: ignore[no-untyped-def]
        held.insert(0, offer)
        for one in held if offer.last else ():
            real(one, peer, now)

    change_offers(world, backwards)
    finish(world, submit(world))
    assert len(held) > 1
    assert reasons(world) == {"offer_out_of_order"}
    assert status(world)["offer_out_of_order"] == len(held) - 1
    check_ends(world)


def test_an_offer_that_comes_after_the_hand_off_is_over(world: World) -> None:
    attempt = submit(world)
    finish(world, attempt)
    late = Offer(attempt=attempt, blocks=[OfferedBlock(block=1, generation=1, key=bytes(16), digest=b"d")])
    tell(world, agent_name("prefill-0", 1), FromPrefill(offer=late))
    assert reasons(world) == {"offer_late"}


def test_a_stale_offer_of_an_old_epoch(world: World) -> None:
    """Said on the link of the life before, or by the new life about what only the old one had."""
    attempt = submit(world)
    run_until(world, "prefill-0>decode-0", 2)  # the answer and an offer of the first life
    words = list(world.queues["prefill-0>decode-0"])
    world.kill_prefill("prefill-0")
    for word in words:
        word()
    world.decode["decode-0"].peers.reach(WorkerAddress(worker="prefill-0", epoch=2, address="prefill-0"))
    stale = Offer(attempt=attempt, blocks=[OfferedBlock(block=1, generation=1, key=b"k")])
    tell(world, agent_name("prefill-0", 2), FromPrefill(offer=stale))
    finish(world, attempt)
    assert reasons(world) == {"word_of_a_lost_link", "offer_late"}
    assert status(world)["word_of_a_lost_link"] == len(words)
    check_ends(world)


def test_a_read_that_ends_after_the_cancel(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    late = world.queues[">decode-0:wire"].pop()
    world.cancel(attempt)
    world.run(check=True)
    late()
    world.run(check=True)
    assert reasons(world) - {"offer_late"} == {"read_given_up", "read_late", "kv_blocks_abandoned"}
    assert status(world)["read_late"] == status(world)["read_given_up"] == 1
    check_ends(world)
    finish(world, submit(world))


def test_a_copy_that_ends_after_the_cancel(world: World) -> None:
    attempt = submit(world)
    while not world.decode["decode-0"].handoffs.copying:
        world.step()
    world.cancel(attempt)
    world.queues["router>decode-0"].pop()()  # before the copy is back
    world.run(check=True)
    assert reasons(world) - {"offer_late", "read_given_up", "read_late"} == {"copy_late", "kv_blocks_abandoned"}
    check_ends(world)
    finish(world, submit(world))


def test_a_read_that_fails_and_one_that_takes_too_long(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    world.queues[">decode-0:wire"].pop()
    core = world.decode["decode-0"]
    [read] = core.handoffs._reads
    core.from_engine(ReadFailed(read, "the wire broke"), world.clock.now())
    world._decode_effects("decode-0")
    run_until(world, ">decode-0:wire")
    late = world.queues[">decode-0:wire"].pop()
    world.wait(6)
    late()
    finish(world, attempt)
    assert reasons(world) >= {"read_failed", "read_given_up", "read_late", "kv_blocks_recomputed"}
    assert status(world)["handoff_left: read failed"] == status(world)["handoff_left: read timed out"] == 1
    check_ends(world)


def test_what_every_holder_refuses_goes_back_to_the_router(world: World) -> None:
    for holder in world.prefill.values():
        holder.draining = True
    submit(world)
    world.run(check=True)
    assert reasons(world) == {"kv_blocks_refused"}
    assert status(world)["kv_blocks_refused"] == FULL
    check_ends(world)


def test_a_prefix_hit_that_rotted(world: World) -> None:
    finish(world, submit(world))
    world.engines["decode-0"].memory.pool[:, 8] ^= 4
    finish(world, submit(world))
    assert reasons(world) == {"prefix_hit_corrupt"}
    check_ends(world)
