"""What is told of each pair: jobs end in one way each, bytes are verified ones, times add up to a hand-off's."""

from collections import Counter

from cluster.core.ids import agent_name
from cluster.stubs.link_pb2 import FromPrefill, JobFailed
from cluster.stubs.watch_pb2 import Pair
from decode_worker.pairs import MOST, Pairs
from decode_worker.transfer import Timeline
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, finish, run_until, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B

SECONDS = ("offer_wait_s", "wire_s", "verify_s", "publish_s", "exposed_s")


def told(world: World) -> dict[str, Pair]:
    return {pair.prefill: pair for pair in world.decode["decode-0"].status().pairs}


def test_a_hand_off_is_its_pair_s() -> None:
    world = warm_world()
    attempt = submit(world)
    run_until(world, "decode-0:wire>")
    world.clock.advance(0.25)
    finish(world, attempt)
    pairs, message = told(world), world.answers[attempt].handed_off
    assert message is not None
    (used,) = (pair for pair in pairs.values() if pair.jobs_sent)
    assert dict(used.jobs) == {"ok": 1}
    counters = world.decode["decode-0"].state.counters
    block_bytes = world.decode["decode-0"].state.facts.layout.block_bytes
    assert used.kv_bytes == message.kv_bytes == counters["kv_bytes"] == len(IDS) // B * block_bytes
    assert {name: getattr(used, name) for name in SECONDS} == {name: getattr(message, name) for name in SECONDS}
    assert used.wire_s >= 0.25


def test_a_holder_that_is_left_is_so_in_its_own_row_and_bytes_stay_with_who_sent_them() -> None:
    world = warm_world()
    attempt = submit(world)
    run_until(world, "decode-0:wire>")
    first = next(name for name, pair in told(world).items() if pair.jobs_sent)
    (peer,) = (p for p in world.decode["decode-0"].peers._peers.values() if p.address.worker == first)
    world.decode["decode-0"].link_closed(peer.name, "cut", world.clock.now())
    world._decode_effects("decode-0")
    finish(world, attempt)
    rows = Counter({how: count for pair in told(world).values() for how, count in pair.jobs.items()})
    state = world.decode["decode-0"].state
    assert state.pairs.of(first).jobs == {"link lost": 1}
    assert sum(pair.kv_bytes for pair in state.pairs.rows.values()) == state.counters["kv_bytes"]
    assert sum(pair.sent for pair in state.pairs.rows.values()) == 1 + rows["ok"]
    assert state.counters["prefill_local"] == sum(n for name, n in state.counters.items() if name.startswith("local: "))


def test_a_job_whose_first_token_was_all_is_answered() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 1, ignore_eos=True)
    finish(world, attempt, 1)
    ends = Counter({how: count for pair in told(world).values() for how, count in pair.jobs.items()})
    assert ends == {"answered": 1}


def test_verified_blocks_that_wait_for_one_before_them_are_the_time_of_publishing() -> None:
    pair, marks = Pairs().of("prefill-0"), Timeline()
    marks.asked(pair, 1.0)
    marks.published(True, 2.0)
    marks.published(True, 3.0)
    marks.published(False, 5.0)
    assert (marks.publish, pair.publish) == (3.0, 3.0)


def test_a_read_that_was_given_up_counts_for_nobody() -> None:
    pair, marks = Pairs().of("prefill-0"), Timeline()
    marks.asked(pair, 0.0)
    marks.offer(16, 1.0)
    marks.post(7, 1.0)
    marks.drop(7)
    marks.left("read timed out")
    marks.left("abandoned")
    assert pair.jobs == {"read timed out": 1}
    assert (pair.wire, pair.kv_bytes, marks.sources, marks.posted) == (0.0, 0, {}, {})


def test_rows_are_bounded_and_those_of_the_gone_are_not_told() -> None:
    pairs = Pairs()
    kept = pairs.of("prefill-0")
    for number in range(2 * MOST):
        pairs.of(f"other-{number}")
        assert pairs.of("prefill-0") is kept
    assert [row.prefill for row in pairs.told({"prefill-0", "nobody"}, {"prefill-0": 2})] == ["prefill-0"]
    assert len(pairs.rows) == MOST


def test_a_prefill_worker_that_may_not_be_used_is_given_no_job() -> None:
    world = warm_world()
    state, peers = world.decode["decode-0"].state, world.decode["decode-0"].peers
    peer = peers.get(agent_name("prefill-0", 1))
    assert peer is not None
    while not peers.breaker(peer).failed(world.clock.now()):
        pass
    finish(world, submit(world))
    assert {name: (pair.sent, dict(pair.jobs)) for name, pair in state.pairs.rows.items()} == {
        "prefill-1": (1, {"ok": 1})
    }
    assert state.counters["job_refused"] == 1


def test_a_prompt_whose_next_holder_may_not_be_used_is_computed_here_for_that_reason() -> None:
    world = warm_world()
    core = world.decode["decode-0"]
    peer = core.peers.get(agent_name("prefill-1", 1))
    assert peer is not None
    while not core.peers.breaker(peer).failed(world.clock.now()):
        pass
    attempt = submit(world)
    run_until(world, "decode-0:wire>")
    failed = JobFailed(attempt=attempt, reason="draining")
    core.from_prefill(agent_name("prefill-0", 1), FromPrefill(failed=failed), world.clock.now())
    world._decode_effects("decode-0")
    finish(world, attempt)
    assert {how: n for how, n in core.state.counters.items() if how.startswith("local: ")} == {"local: unusable": 1}
    assert core.state.pairs.rows.keys() == {"prefill-0"}
    assert core.state.pairs.of("prefill-0").jobs == {"job failed": core.state.pairs.of("prefill-0").sent}
