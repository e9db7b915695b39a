"""Ways in which other split servers answer with wrong text, tried here (docs/faults.md, C01 to C16)."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.core.config import ClusterConfig
from cluster.stubs.common_pb2 import WorkerIdentity
from decode_worker.attempts import Phase
from decode_worker.peers import identity_difference
from engine.messages import Command, Read, ReadFailed, Report, Step
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, finish, run_until_still, submit, warm_world
from tests.unit.workers.test_tracer_matrix import SEEDED, B, config, expected, prompt

FULL = len(IDS) // B


def small_pools(*, prefill: int = 128, decode: int = 128, **handoff: float) -> ClusterConfig:
    """Pools of so many blocks."""
    settings = config(chunk_tokens=32).model_dump(mode="json")
    settings["pools"] = {"prefill": {"pool_tokens": prefill * B}, "decode": {"pool_tokens": decode * B}}
    settings["handoff"].update(handoff)
    return ClusterConfig.model_validate(settings)


def wrap_engine(
    world: World, name: str, around: Callable[[Command, Callable[[Command], Report | None]], object]
) -> None:
    """`around(command, real)` answers in the place of an engine."""
    engine = world.engines[name]
    real = engine.handle
    engine.handle = lambda command: around(command, real)  # type: ignore[method-assign, assignment, return-value]


def phase(world: World, attempt: str) -> Phase | None:
    found = world.decode["decode-0"].state.attempts.get(attempt)
    return None if found is None else found.phase


# -- C03: holds that end before the read ------------------------------------------------------------------------------


def test_pins_that_expired_before_the_read_are_noticed_by_the_reader() -> None:
    world = World(small_pools(prefill=8, pin_s=0.2), decode=2)
    attempt = submit(world)
    run_until_still(world, ">decode-0:wire")
    assert world.queues[">decode-0:wire"], "reads that have not run"
    world.tick(0.5)
    assert counters(world, "prefill-0")["jobs_pins_expired"] == 1
    other = prompt(len(IDS), 1)
    second = world.submit(other, 20, decode="decode-1", ignore_eos=True)
    run_until_still(world, ">decode-0:wire")
    assert world.answers[second].tokens[0] == expected(other, 20)
    finish(world, attempt)
    assert counters(world)["kv_blocks_stale"] > 0


def test_who_waits_for_room_holds_nothing_on_a_prefill_worker() -> None:
    """The job goes out when the decode worker has reserved everything, so no hold can run out while it queues."""
    world = World(small_pools(decode=FULL + 4))
    running = world.submit(prompt(len(IDS), 1), 2 * B, ignore_eos=True)
    while phase(world, running) is not Phase.DECODING:
        world.step()
    waiting = submit(world)
    while phase(world, waiting) is None:
        world.step()
    assert phase(world, waiting) is Phase.WAITING
    assert counters(world, "prefill-0")["jobs_accepted"] == 1
    finish(world, waiting)
    assert world.answers[running].tokens[0] == expected(prompt(len(IDS), 1), 2 * B)
    assert counters(world, "prefill-0")["jobs_accepted"] == 2


# -- C05: a refusal ends both legs ------------------------------------------------------------------------------------


def test_what_prefill_can_never_hold_is_said_before_anything_is_computed_and_decode_writes_nothing() -> None:
    world = World(small_pools(prefill=FULL - 2))
    attempt = submit(world)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.lost.startswith("no_prefill")
    assert not answer.tokens
    for name in ("decode-0", "prefill-0"):
        assert "steps" not in counters(world, name)
    world.assert_quiet()
    finish(world, world.submit(IDS, 20, prefill=[], ignore_eos=True))


# -- C06, C07, F08: pairs that do not fit -----------------------------------------------------------------------------

OTHER: dict[str, Callable[[WorkerIdentity], None]] = {
    "layers": lambda theirs: setattr(theirs.layout, "layers", 31),
    "kv_heads": lambda theirs: setattr(theirs.layout, "kv_heads", 7),
    "head_dim": lambda theirs: setattr(theirs.layout, "head_dim", 96),
    "block_size": lambda theirs: setattr(theirs.layout, "block_size", 64),
    "dtype": lambda theirs: setattr(theirs.layout, "dtype", "float8_e4m3fn"),
    "fingerprint": lambda theirs: setattr(theirs, "fingerprint", b"other weights"),
    "protocol": lambda theirs: setattr(theirs, "protocol", 99),
}


def two_identities() -> tuple[WorkerIdentity, WorkerIdentity]:
    world, theirs = World(config()), WorkerIdentity()
    theirs.CopyFrom(world.prefill["prefill-0"]._hello.identity)
    return world.decode["decode-0"].state.facts.identity, theirs


@pytest.mark.parametrize("field", OTHER)
def test_a_difference_that_changes_bytes_is_named_with_both_values(field: str) -> None:
    ours, theirs = two_identities()
    OTHER[field](theirs)
    reason = identity_difference(ours, theirs) or ""
    assert reason.startswith(f"{field}: ")
    here, there = reason.removeprefix(f"{field}: ").split(", ")
    assert here.removesuffix(" here") != there.removesuffix(" there")


def test_a_difference_that_changes_no_bytes_is_none() -> None:
    """Another name, address, role, epoch or version of the program: not what KV depends on."""
    ours, theirs = two_identities()
    theirs.worker, theirs.address, theirs.epoch = "prefill-9", "10.0.0.1:5", 77
    assert theirs.role != ours.role
    assert identity_difference(ours, theirs) is None


# -- C08: complete or not ---------------------------------------------------------------------------------------------


def test_a_first_token_that_comes_before_the_blocks_starts_nothing() -> None:
    world = warm_world()
    attempt = submit(world)
    run_until_still(world, ">decode-0:wire")
    world.clock.advance(0.01)
    world.decode["decode-0"].flush(world.clock.now())
    world._decode_effects("decode-0")
    run_until_still(world, ">decode-0:wire")
    assert world.answers[attempt].tokens[0] == expected(IDS, 1), "forwarded at once"
    assert phase(world, attempt) is Phase.HANDING_OFF
    reads = world.queues[">decode-0:wire"]
    while reads:
        assert "steps" not in counters(world), "no token before the last block is proved"
        reads.popleft()()
        if reads:
            run_until_still(world, ">decode-0:wire")
    finish(world, attempt)


# -- C11: recompute after a failed transfer ---------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a stream"])
@pytest.mark.parametrize("block", [0, FULL // 2, FULL - 1])
@pytest.mark.parametrize("holders", [1, 2])
def test_a_read_that_fails_at_this_block_is_made_up_for(block: int, holders: int, beside: bool) -> None:
    world = World(config(chunk_tokens=32), prefill=holders, seed=block)
    if beside:
        stream = world.submit(prompt(2 * B, 5), 60, prefill=[], ignore_eos=True)
        while not world.answers[stream].tokens[0]:
            world.step()
    attempt, core, failed = submit(world), world.decode["decode-0"], list[int]()

    def fail(command: Command, real: Callable[[Command], Report | None]) -> Report | None:
        if isinstance(command, Read) and not failed:
            transfer = core.handoffs._reads[command.id]
            if block in transfer.handoff._reads[command.id].offers:
                failed.append(command.id)
                return ReadFailed(command.id, "the wire broke")
        return real(command)

    wrap_engine(world, "decode-0", fail)
    answer = finish(world, attempt)
    assert failed
    assert counters(world)["read_failed"] == 1
    assert answer.prefill_on == ["prefill-0", "local" if holders == 1 else "prefill-1"]
    assert (counters(world).get("kv_blocks_recomputed", 0) > 0) == (holders == 1)
    if beside:
        assert world.answers[stream].tokens[0] == expected(prompt(2 * B, 5), 60)


# -- C13, C14: the first token is the last ----------------------------------------------------------------------------


def with_eos(token: int) -> World:
    world = warm_world()
    state = world.decode["decode-0"].state
    state.facts = replace(state.facts, eos_ids=frozenset({token}))
    return world


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_a_first_token_that_is_the_end_of_text_ends_it_at_once(split: bool) -> None:
    [eos] = expected(IDS, 1)
    world = with_eos(eos)
    attempt = world.submit(IDS, 50, prefill=None if split else [])
    world.run(check=True)
    assert world.answers[attempt].tokens[0] == [eos]
    assert world.answers[attempt].ends == {0: "eos"}
    world.assert_quiet()


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_ignoring_the_end_of_text_holds_for_the_first_token_too(split: bool) -> None:
    [eos] = expected(IDS, 1)
    world = with_eos(eos)
    attempt = world.submit(IDS, 8, prefill=None if split else [], ignore_eos=True)
    world.run(check=True)
    assert world.answers[attempt].tokens[0] == expected(IDS, 8)
    assert world.answers[attempt].ends == {0: "length"}


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("n", [1, 3])
def test_one_token_is_one_token_and_a_stop_goes_before_the_length(n: int, split: bool) -> None:
    world = warm_world()
    right = [expected(IDS, 1, SEEDED, i) for i in range(n)]
    attempt = world.submit(
        IDS, 1, n=n, prefill=None if split else [], sampling=SEEDED, stop_token_ids=right[0], ignore_eos=True
    )
    world.run(check=True)
    answer = world.answers[attempt]
    assert [answer.tokens[i] for i in range(n)] == right
    assert answer.ends == {i: "stop" if right[i] == right[0] else "length" for i in range(n)}
    world.assert_quiet()


# -- C15, C16: what the prefill worker is asked for -------------------------------------------------------------------


def test_a_prefill_worker_draws_the_first_tokens_and_no_other() -> None:
    """It gets a job of our own, not the client's request: there is nothing it could generate from."""
    world, drawn = warm_world(), list[int]()

    def count(command: Command, real: Callable[[Command], Report | None]) -> Report | None:
        done = real(command)
        if isinstance(command, Step):
            drawn.extend(len(samples) for samples in done.samples)  # type: ignore[union-attr]
        return done

    wrap_engine(world, "prefill-0", count)
    attempt = world.submit(IDS, 3 * B, n=2, sampling=SEEDED, ignore_eos=True)
    world.run(check=True)
    assert [world.answers[attempt].tokens[i] for i in range(2)] == [expected(IDS, 3 * B, SEEDED, i) for i in range(2)]
    assert sum(drawn) == 2


@pytest.mark.parametrize("moment", range(0, 160, 16))
def test_samples_share_one_hand_off_and_leave_together(moment: int) -> None:
    world = warm_world(seed=moment)
    attempt = world.submit(IDS, 2 * B, n=4, sampling=SEEDED, ignore_eos=True)
    for _ in range(moment):
        world.step()
    world.cancel(attempt)
    world.run(check=True)
    assert counters(world, "prefill-0").get("jobs_accepted", 0) <= 1
    assert counters(world).get("kv_blocks_wanted", 0) in (0, FULL), "one prompt, not four"
    for index in range(4):
        got = world.answers[attempt].tokens[index]
        assert got == expected(IDS, 2 * B, SEEDED, index)[: len(got)]
    world.wait(8)
    world.assert_quiet()
