"""What is in a worker's prefix index was proved, belongs to who asks, and stays as long as it is promised (I1, I6)."""

import pytest

from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.link_pb2 import BlockRef, CancelJob, FromDecodePeer, Job, Recheck, RecheckedBlock
from engine.messages import Command, Read, Report
from prefill_worker.core import PrefillCore
from prefill_worker.effects import ToDecode, ToEngine
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, finish, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B, config, expected

FULL = len(IDS) // B


def assert_proved(world: World) -> None:
    """Every published block of the decode worker holds the bytes that its digest is of."""
    books, memory = world.decode["decode-0"].state.books, world.engines["decode-0"].memory
    for block in books.match(books.keys()):
        assert memory.digests([block]) == [books.digest_of(block)], f"block {block} is published without proof"


@pytest.mark.parametrize("flipped", [0, 1, 2])
def test_nothing_is_in_the_prefix_index_that_was_not_proved(flipped: int) -> None:
    """At no moment: not while a copy runs, and not while a block that came over wrong waits to be read again."""
    world = warm_world(seed=flipped)
    engine, left = world.engines["decode-0"], [flipped]
    real = engine.handle

    def handle(command: Command) -> Report | None:
        report = real(command)
        if isinstance(command, Read) and left[0]:
            left[0] -= 1
            engine.memory.staging[command.slot, 3] ^= 8
        return report

    engine.handle = handle  # type: ignore[method-assign]
    attempt = submit(world)
    while world.step():
        assert_proved(world)
    books = world.decode["decode-0"].state.books
    assert len(books.keys()) >= FULL
    assert counters(world).get("digest_mismatch", 0) == flipped
    finish(world, attempt)


@pytest.mark.parametrize("path", ["local", "split"])
def test_a_tenants_prefix_is_no_hit_for_another(path: str) -> None:
    """Nor can the time of an answer tell what others have asked (FAULTS C33)."""
    world = World(config(), decode=3)
    cached = []
    for place, tenant in enumerate((b"one", b"two", b"one")):
        decode = "decode-0" if path == "local" else f"decode-{place}"
        attempt = world.submit(
            IDS, 5, decode=decode, prefill=[] if path == "local" else None, salt=tenant, ignore_eos=True
        )
        world.run(check=True)
        answer = world.answers[attempt]
        assert answer.tokens[0] == expected(IDS, 5)
        assert answer.prefill_on == ["local" if path == "local" else "prefill-0"]
        last = answer.events[0].prefill_on if path == "local" else answer.handed_off
        cached.append(last.cached_tokens)
    assert cached == [0, 0, FULL * B]


class Prefill:
    """A prefill worker's brain and its engine; the test is the decode worker."""

    def __init__(self) -> None:
        self.world = World(config(), decode=0)
        self.core: PrefillCore = self.world.prefill["prefill-0"]
        self.memory = self.world.engines["prefill-0"].memory

    def says(self, message: FromDecodePeer) -> list[ToDecode]:
        """What it answers, once its engine has done all that it was told."""
        self.core.from_decode("decode-0", message, 0.0)
        heard: list[ToDecode] = []
        while effects := self.core.take_effects():
            heard += [effect for effect in effects if isinstance(effect, ToDecode)]
            for effect in effects:
                report = (
                    self.world.engines["prefill-0"].handle(effect.command) if isinstance(effect, ToEngine) else None
                )
                if report is not None:
                    self.core.from_engine(report, 0.0)
        return heard

    def read(self) -> list[BlockRef]:
        """Have it read the prompt; the blocks it offers."""
        sampling = Sampling(top_p=1.0, logprobs=-1)
        job = Job(attempt="a", tokens=IDS, sample_indices=[0], sampling=sampling, deadline_s=60.0)
        heard = self.says(FromDecodePeer(job=job))
        assert any(effect.message.HasField("first") for effect in heard)
        return [
            BlockRef(block=block.block, generation=block.generation)
            for effect in heard
            for block in effect.message.offer.blocks
        ]

    def recheck(self, blocks: list[BlockRef]) -> list[RecheckedBlock]:
        answer, *_ = self.says(FromDecodePeer(recheck=Recheck(attempt="a", blocks=blocks)))
        return list(answer.message.recheck.blocks)


def test_a_holder_vouches_for_nothing_that_has_another_life() -> None:
    prefill = Prefill()
    offered = prefill.read()
    assert len(offered) == FULL
    assert all(block.current for block in prefill.recheck(offered))
    others = [BlockRef(block=b.block, generation=b.generation + by) for b in offered for by in (-1, 1)]
    assert not any(block.current for block in prefill.recheck(others))


def test_a_block_that_rotted_leaves_the_holders_prefix_index() -> None:
    """Nobody is offered it again: not even one that would not look."""
    prefill = Prefill()
    offered = prefill.read()
    prefill.memory.pool[offered[2].block, 5] ^= 1
    assert [block.current for block in prefill.recheck(offered)] == [True, True, False, *[True] * (FULL - 3)]
    assert not prefill.core.books.is_published(offered[2].block)
    assert prefill.core.counters["block_corrupt"] == 1
    prefill.core.check_integrity()


def test_offered_blocks_stay_until_they_are_taken_or_for_a_while() -> None:
    """A courtesy to who still reads them: they are evicted for nobody before that (DESIGN §4)."""
    prefill = Prefill()
    offered = prefill.read()
    core, pin_s = prefill.core, prefill.world.config.handoff.pin_s
    for at in (0.0, 0.1, pin_s):
        core.tick(at)
        assert core.books.allocate(core.books.available + 1, "somebody") is None
        assert core.books.in_use >= len(offered)
    core.tick(pin_s + 0.1)
    assert (core.books.in_use, core.counters["jobs_pins_expired"]) == (0, 1)


def test_a_cancelled_job_gives_its_blocks_back_at_once() -> None:
    prefill = Prefill()
    prefill.read()
    prefill.says(FromDecodePeer(cancel=CancelJob(attempt="a")))
    assert (prefill.core.books.in_use, prefill.core.counters["jobs_cancelled"]) == (0, 1)
