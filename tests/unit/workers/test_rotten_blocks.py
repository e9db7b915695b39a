"""KV goes bad in memory or on the way: nothing computed from it is used, and who sends it is left alone.

DESIGN §4.8: P drops the block and its descendants, D drops what it took after it from that P.
"""

from pathlib import Path

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import Grammar, Sampling
from cluster.stubs.link_pb2 import BlockRef, CancelJob, FromDecodePeer, FromPrefill, Job, JobFailed, Recheck
from engine.messages import Command, Prepare, Prepared, Read, Report
from prefill_worker.core import PrefillCore
from prefill_worker.effects import Effect, ToDecode, ToEngine
from prefill_worker.jobs import Phase
from tests.checkpoints import make_checkpoint
from tests.parity.lab import Lab
from tests.parity.lab import prompt as lab_prompt
from tests.unit.workers.test_faults import IDS, finish, run_until_still, submit, warm_world
from tests.unit.workers.test_prefix_index import FULL, Prefill
from tests.unit.workers.test_reasons import tell
from tests.unit.workers.test_tracer_matrix import B, expected, prompt


def test_descendants_of_a_rotten_block_leave_the_holders_index() -> None:
    prefill = Prefill()
    offered = prefill.read()
    prefill.memory.pool[offered[2].block, 5] ^= 1
    prefill.recheck([offered[2]])
    assert prefill.core.counters["block_corrupt"] == 1
    kept = [prefill.core.books.is_published(b.block) for b in offered]
    assert kept == [True, True, *[False] * (FULL - 2)]


def test_a_rotten_block_that_was_never_published_is_not_vouched_for() -> None:
    """Two jobs read one prompt at a time; the second's blocks are its own, and known by what it offered alone."""
    prefill = Prefill()
    core, sampling = prefill.core, Sampling(top_p=1.0, logprobs=-1)
    for link, attempt in (("decode-0", "a"), ("decode-1", "b")):
        job = Job(attempt=attempt, tokens=IDS, sample_indices=[0], sampling=sampling, deadline_s=60.0)
        core.from_decode(link, FromDecodePeer(job=job), 0.0)
    prefill.says(FromDecodePeer(cancel=CancelJob(attempt="nobody")))
    first, second = (core.jobs[key].sequence.blocks for key in (("decode-0", "a"), ("decode-1", "b")))
    assert [core.books.is_published(block) for block in first[:FULL]] == [True] * FULL
    assert not any(core.books.is_published(block) for block in second[:FULL])
    prefill.memory.pool[second[2], 5] ^= 1
    ref = BlockRef(block=second[2], generation=core.books.generation(second[2]))
    core.from_decode("decode-1", FromDecodePeer(recheck=Recheck(attempt="b", blocks=[ref])), 0.0)
    told = [e.message for e in prefill.says(FromDecodePeer(cancel=CancelJob(attempt="nobody")))]
    [answer] = [message.recheck.blocks[0] for message in told if message.HasField("recheck")]
    assert (answer.current, answer.corrupt) == (False, True)
    assert [message.failed.distrusted_from for message in told if message.HasField("failed")] == [3, 2]
    kept = [core.books.is_published(block) for block in first[:FULL]]
    assert kept == [True, True, True, *[False] * (FULL - 3)], "what follows its key may be computed from it"
    core.check_integrity()


def test_a_block_that_rots_while_its_job_waits_for_a_grammar_kills_nobody() -> None:
    """Its prefix hits were proved; then another reader's recheck finds one rotten; then the grammar is ready."""
    prefill = Prefill()
    offered = prefill.read()
    core, world = prefill.core, prefill.world
    engine = world.engines["prefill-0"]
    grammar = Grammar(kind="regex", source="[a-f]{4,12}(xy|z)")
    job = Job(
        attempt="b",
        tokens=IDS,
        sample_indices=[0],
        deadline_s=60.0,
        sampling=Sampling(top_p=1.0, logprobs=-1, grammar=grammar),
    )

    waiting: list[Prepare] = []

    def carry() -> None:
        while effects := core.take_effects():
            for effect in effects:
                if not isinstance(effect, ToEngine):
                    continue
                if isinstance(effect.command, Prepare):
                    waiting.append(effect.command)
                    continue
                report = engine.handle(effect.command)
                if report is not None:
                    core.from_engine(report, 0.0)

    core.from_decode("decode-0", FromDecodePeer(job=job), 0.0)
    carry()
    assert waiting
    prefill.memory.pool[offered[2].block, 5] ^= 1
    core.from_decode("decode-1", FromDecodePeer(recheck=Recheck(attempt="a", blocks=[offered[2]])), 0.0)
    carry()
    assert core.counters["block_corrupt"] == 1
    core.from_engine(Prepared(waiting[0].id, ""), 0.0)
    carry()
    assert core.counters["jobs_failed"] == 2, "both that built on it, and their readers were told"
    core.check_integrity()


def test_a_doubted_copy_of_a_holder_that_was_left_is_not_held_against_the_next() -> None:
    """A copy of what prefill-0 sent is wrong; when that is found out, prefill-1 has the job."""
    world = warm_world()
    assert world.prefill["prefill-1"].books.allocate(7, "others")  # block ids there are not those of prefill-0
    attempt = submit(world)
    engine = world.engines["decode-0"]
    land = engine.land

    def bent(slot: int, at: int, parts: object) -> None:
        land(slot, at, parts)  # type: ignore[arg-type]
        if "prefill-1" not in world.answers[attempt].prefill_on:
            engine.memory.staging[slot, 3] ^= 8

    engine.land = bent  # type: ignore[assignment, method-assign]
    while not world.decode["decode-0"].handoffs.copying:
        assert world.step()
    tell(world, agent_name("prefill-0", 1), FromPrefill(failed=JobFailed(attempt=attempt, reason="draining")))
    run_until_still(world, ">decode-0:main")  # prefill-1 reads the prompt and offers it
    world.run()
    world.wait(8)
    answer = world.answers[attempt]
    left = {k: v for k, v in world.decode["decode-0"].state.counters.items() if k.startswith("handoff_left")}
    assert answer.prefill_on == ["prefill-0", "prefill-1"], (answer.prefill_on, left)
    assert left == {"handoff_left: job failed": 1}, left


def test_what_was_distrusted_afterwards_was_not_transferred() -> None:
    """The digests of what is being copied are right; its holder takes it back; the next one sends it again."""
    world = warm_world()
    core, attempt = world.decode["decode-0"], submit(world)
    while not core.handoffs.copying:
        assert world.step()
    rotten = JobFailed(attempt=attempt, reason="block changed", distrusted_from=0)
    tell(world, agent_name("prefill-0", 1), FromPrefill(failed=rotten))
    message = finish(world, attempt).handed_off
    assert core.state.counters["kv_blocks_distrusted"] > 0
    assert message is not None
    assert (message.transferred_tokens, message.recomputed_tokens) == (FULL * B, 0)
    assert message.kv_bytes == core.state.counters["kv_bytes"]


def test_what_was_computed_from_a_rotten_block_is_not_used(tmp_path: Path) -> None:
    """A real model: its KV depends on what came before it, which the tracer's does not."""
    folder = make_checkpoint(tmp_path, "llama", 3, max_position_embeddings=1024)
    lab = Lab("llama", folder)
    ids = lab_prompt(10 * B + 5)
    streams = []
    for rotten in (False, True):
        world = lab.world(prefill=2, decode=2, chunk_tokens=16)
        lab.ask(world, ids[: 4 * B + 1], decode="decode-1", prefill=["prefill-0"])
        world.run()
        core = world.prefill["prefill-0"]
        hold_back_ends(core)
        asked = lab.ask(world, ids)
        while not any(j.phase is Phase.RUNNING for j in core.jobs.values()):
            assert world.step()
        [job] = core.jobs.values()
        assert job.prefix_blocks == 4
        if rotten:
            pool, blocks = world.engines["prefill-0"].memory.pool, job.sequence.blocks
            pool[blocks[1]] = pool[blocks[0]]
        world.run()
        world.wait(20)
        answer = world.answers[asked.attempt]
        if rotten:
            assert core.counters["block_corrupt"] == 1
            assert world.decode["decode-0"].state.counters["kv_blocks_distrusted"] > 0
        streams.append(answer.tokens[0])
    assert streams[1] == streams[0]


def hold_back_ends(core: PrefillCore) -> None:
    """Its first tokens, and word of the end of its jobs, are on their way for long."""
    honest = core.take_effects

    def take_effects() -> list[Effect]:
        ends = ("first", "done")
        return [e for e in honest() if not (isinstance(e, ToDecode) and e.message.WhichOneof("message") in ends)]

    core.take_effects = take_effects  # type: ignore[method-assign]


def test_a_wire_that_bends_every_read_is_not_tried_by_every_request() -> None:
    world = warm_world()
    engine = world.engines["decode-0"]
    real = engine.handle

    def handle(command: Command) -> Report | None:
        report = real(command)
        if isinstance(command, Read) and command.peer == agent_name("prefill-0", 1):
            engine.memory.staging[command.slot, 3] ^= 8
        return report

    engine.handle = handle  # type: ignore[method-assign]
    asked = []
    for number in range(8):
        ids = prompt(6 * B + 5, number)
        attempt = world.submit(ids, 8, ignore_eos=True)
        world.run(check=True)
        assert world.answers[attempt].tokens[0] == expected(ids, 8)
        asked.append(world.answers[attempt].prefill_on[0])
    assert "prefill-1" in asked, asked
