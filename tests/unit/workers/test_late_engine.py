"""An engine that stands still while its server lives: no new work within three seconds, given up after ten (I9).

Found by chaos: a prefill worker whose engine was stopped went on to accept jobs, each with an eta that made decode
workers wait for it; and an engine that froze while it owed nothing but a digest was never given up.
"""

import pytest

from decode_worker.effects import Lost as DecodeLost
from prefill_worker.effects import Lost as PrefillLost
from tests.fakes.world import World
from tests.unit.workers.test_faults import run_until_still
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt

IDS = prompt(6 * B + 5)


def ticks(world: World, seconds: float, frozen: str) -> None:
    """Let time pass at the cores while messages move, but nothing reaches the engine of `frozen`."""
    for _ in range(round(seconds * 10)):
        world.clock.advance(0.1)
        for name, decode in world.decode.items():
            decode.tick(world.clock.now())
            if not any(isinstance(effect, DecodeLost) for effect in decode.state.effects):
                world._decode_effects(name)
        for name, prefill in world.prefill.items():
            prefill.tick(world.clock.now())
            if not any(isinstance(effect, PrefillLost) for effect in prefill._effects):
                world._prefill_effects(name)
        run_until_still(world, f">{frozen}:main")


def test_a_late_prefill_worker_refuses_and_the_next_one_serves() -> None:
    world = World(config(), prefill=2)
    world.submit(IDS, 20, prefill=["prefill-0"], ignore_eos=True)
    run_until_still(world, ">prefill-0:main")
    ticks(world, 2.3, "prefill-0")
    assert world.prefill["prefill-0"].status().ready
    ticks(world, 0.4, "prefill-0")
    assert not world.prefill["prefill-0"].status().ready
    other = prompt(6 * B + 5, 1)
    attempt = world.submit(other, 20, ignore_eos=True)
    run_until_still(world, ">prefill-0:main")
    ticks(world, 0.3, "prefill-0")
    assert world.answers[attempt].tokens[0] == expected(other, 20), "nobody waited for the late one"
    assert world.prefill["prefill-0"].counters["jobs_refused"] == 1
    world.run()
    ticks(world, 0.1, "nobody")
    assert world.prefill["prefill-0"].status().ready, "it answered"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_owes_a_digest_is_late_and_then_given_up(role: str) -> None:
    world = World(config())
    split: list[str] | None = None if role == "prefill" else []
    world.submit(IDS, 1 if role == "prefill" else 20, prefill=split, ignore_eos=True)
    world.run()
    world.wait(6)
    name = f"{role}-0"
    core = world.prefill[name] if role == "prefill" else world.decode[name]
    if role == "prefill":  # the decode worker must not have the prefix itself
        world.add_decode("decode-1")
    world.submit(IDS, 20, decode="decode-1" if role == "prefill" else "decode-0", prefill=split, ignore_eos=True)
    run_until_still(world, f">{name}:main")
    batcher = world.prefill[name].batcher if role == "prefill" else world.decode[name].state.batcher
    assert world.queues[f">{name}:main"], "the digest of the prefix hits"
    assert not batcher.in_flight, "no plan that could be overdue"
    ticks(world, 2.7, name)
    assert not core.status().ready
    ticks(world, 7.5, name)
    lost = [effect for effect in core.take_effects() if isinstance(effect, PrefillLost | DecodeLost)]
    assert lost
    assert "overdue" in lost[0].reason
