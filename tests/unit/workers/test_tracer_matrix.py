"""The parity matrix at speed: every path must give the tokens of the tracer's plain-Python reference (I1, I5)."""

import random
from typing import Any

import pytest

from cluster.core.config import ClusterConfig
from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.session_pb2 import SampleState
from engine.messages import Row, SampleSpec, Step, StepDone, TracerModel
from engine.model.tracer import reference_tokens
from tests.fakes.world import World

B = 16
SPEC = TracerModel()
LENGTHS = [1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1]
SEEDED = Sampling(temperature=0.9, top_p=0.9, top_k=50, seed=7, logprobs=-1)


def config(**engine: Any) -> ClusterConfig:
    settings = {"block_size": B, "pool_tokens": 2048, "chunk_tokens": 64, "poison": True, **engine}
    return ClusterConfig.model_validate({"model": "tracer", "engine": settings, "handoff": {"slot_bytes": 4096}})


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(1, 1000), k=length)


def expected(tokens: list[int], count: int, sampling: Sampling | None = None, index: int = 0) -> list[int]:
    s = sampling or Sampling(top_p=1.0)
    spec = SampleSpec(index, s.seed, s.temperature, s.top_p, s.top_k, -1)
    return reference_tokens(tokens, count, SPEC, spec, stop_at_eos=False)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_every_length_and_chunk(split: bool, length: int, chunk: int, sampling: Sampling | None) -> None:
    world = World(config(chunk_tokens=chunk), seed=length)
    ids = prompt(length)
    attempt = world.submit(ids, 20, prefill=None if split else [], sampling=sampling, ignore_eos=True)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.tokens[0] == expected(ids, 20, sampling)
    assert answer.ends == {0: "length"}
    assert answer.prefill_on == (["prefill-0"] if split else ["local"])
    if split:
        moved = length // B * B
        assert (answer.handed_off.transferred_tokens if answer.handed_off else 0) == moved
    world.tick(6)
    world.run()
    world.assert_quiet()


@pytest.mark.parametrize("where", ["P", "D", "both"])
@pytest.mark.parametrize("cached", [1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1, 5 * B])
def test_every_cached_prefix(where: str, cached: int) -> None:
    world = World(config())
    ids = prompt(5 * B)
    if where in ("P", "both"):
        world.submit(ids[:cached], 1, ignore_eos=True)
        world.run()
    if where in ("D", "both"):
        world.submit(ids[:cached], 1, prefill=[], ignore_eos=True)
        world.run()
    attempt = world.submit(ids, 20, ignore_eos=True)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.tokens[0] == expected(ids, 20)
    on_p = min(cached // B, 4) * B if where != "D" else 0
    on_d = min(cached // B, 4) * B if where != "P" else 0
    assert answer.handed_off.cached_tokens == on_p
    assert answer.handed_off.transferred_tokens == 5 * B - on_d
    world.tick(6)
    world.run()
    world.assert_quiet()
    checked = world.prefill["prefill-0"].counters + world.decode["decode-0"].state.counters
    assert not checked["prefix_hit_corrupt"], "hits that nobody touched must pass their proof"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_three_samples_of_one_prompt(split: bool, length: int) -> None:
    world = World(config(), seed=length)
    ids = prompt(length)
    attempt = world.submit(ids, 12, n=3, prefill=None if split else [], sampling=SEEDED, ignore_eos=True)
    world.run(check=True)
    answer = world.answers[attempt]
    assert {i: answer.tokens[i] for i in range(3)} == {i: expected(ids, 12, SEEDED, i) for i in range(3)}
    assert len({tuple(t) for t in answer.tokens.values()}) == 3
    world.tick(6)
    world.assert_quiet()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("emitted", [1, 5, B, B + 1])
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("n", [1, 2])
def test_going_on_from_history(split: bool, length: int, emitted: int, n: int) -> None:
    """A new attempt is told what was emitted before, and continues as if nothing had happened."""
    world = World(config(), seed=length)
    ids = prompt(length)
    whole = [expected(ids, 24, SEEDED, i) for i in range(n)]
    histories = [SampleState(emitted=whole[i][: emitted if i == 0 else 0]) for i in range(n)]
    attempt = world.submit(
        ids, 24, prefill=None if split else [], sampling=SEEDED, histories=histories, ignore_eos=True
    )
    world.run(check=True)
    answer = world.answers[attempt]
    assert [list(h.emitted) + answer.tokens[i] for i, h in enumerate(histories)] == whole
    assert answer.starts == {i: len(h.emitted) for i, h in enumerate(histories)}
    world.tick(6)
    world.assert_quiet()


def test_preempted_streams_go_on_elsewhere_with_the_same_tokens() -> None:
    world = World(config(pool_tokens=12 * B))
    prompts = [prompt(2 * B, i) for i in range(4)]
    running: dict[str, tuple[list[int], list[int]]] = {}
    for ids in prompts:
        running[world.submit(ids, 60, ignore_eos=True)] = (ids, [])
    finished: list[list[int]] = []
    preempted = 0
    for _ in range(60):
        world.run(check=True)
        for attempt, (ids, before) in list(running.items()):
            answer = world.answers[attempt]
            done = before + answer.tokens[0]
            if answer.ends:
                finished.append(ids + done)
                del running[attempt]
            elif answer.lost:
                preempted += answer.lost.startswith("preempted")
                del running[attempt]
                again = world.submit(ids, 60, histories=[SampleState(emitted=done)], ignore_eos=True, preemptions=1)
                running[again] = (ids, done)
        world.tick(1)
    assert not running
    assert preempted > 0
    assert sorted(finished) == sorted(p + expected(p, 60) for p in prompts)
    world.tick(6)
    world.assert_quiet()


@pytest.mark.parametrize("length", [4 * B, 4 * B + 1])
@pytest.mark.parametrize("n", [1, 2])
def test_a_complete_prompt_whose_first_token_never_came(n: int, length: int) -> None:
    """The last position is run again for its logits; a published block is not written a second time (DESIGN §4.9)."""
    world = World(config(), seed=length)
    core, engine = world.decode["decode-0"], world.engines["decode-0"]
    core.handoffs.first = lambda message, peer, now: None  # type: ignore[method-assign]
    real, rows = engine.stepper.run, list[Row]()

    def run(step: Step) -> StepDone:
        rows.extend(step.rows)
        return real(step)

    engine.stepper.run = run  # type: ignore[method-assign]
    ids = prompt(length)
    attempt = world.submit(ids, 20, n=n, sampling=SEEDED, ignore_eos=True)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.handed_off.transferred_tokens == 4 * B
    assert {i: answer.tokens[i] for i in range(n)} == {i: expected(ids, 20, SEEDED, i) for i in range(n)}
    first = rows[0]
    assert (first.start, first.write, len(first.samples)) == (length - 1, length % B > 0, n)
    world.tick(6)
    world.run()
    world.assert_quiet()


def test_max_tokens_one_makes_no_hand_off() -> None:
    world = World(config())
    ids = prompt(5 * B + 3)
    attempt = world.submit(ids, 1, ignore_eos=True)
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.tokens[0] == expected(ids, 1)
    assert answer.ends == {0: "length"}
    assert answer.handed_off is None
    world.assert_quiet()


def test_first_token_that_ends_the_sample_ends_the_hand_off() -> None:
    world = World(config())
    ids = prompt(5 * B)
    attempt = world.submit(ids, 50, stop_token_ids=expected(ids, 1))
    world.run(check=True)
    assert world.answers[attempt].tokens[0] == expected(ids, 1)
    assert world.answers[attempt].ends == {0: "stop"}
    world.tick(6)
    world.assert_quiet()
