"""The modelled cluster: its times are those of its hardware, its books come out even, a seed is the whole story."""

from pathlib import Path

import pytest

from benchmarks.modelled.cluster import NODE, Shape
from benchmarks.modelled.floor import floor
from benchmarks.modelled.hardware import H100_NODE
from benchmarks.modelled.player import Outcome, Player
from benchmarks.modelled.traces import BLOCK, Ask, arriving, read_trace, repeated
from cluster.core.config import RouterSettings
from cluster.core.errors import Overloaded

SMALL = H100_NODE.scaled(80)


def settings(policy: str = "cost", queue_limit: int = 1000) -> RouterSettings:
    return RouterSettings.model_validate({"policy": policy, "queue_limit": queue_limit})


def ask(at: float, blocks: int, first: int, output: int = 50, shared: int = 0) -> Ask:
    ids = (*range(shared), *range(first, first + blocks - shared))
    return Ask(at, ids, blocks * BLOCK, output)


def play(asks: list[Ask], shape: Shape, policy: str = "cost", seed: int = 1) -> list[Outcome]:
    return Player(asks, shape, settings(policy), seed).play()


def test_a_request_alone_takes_what_the_hardware_takes() -> None:
    (outcome,) = play([ask(0.0, 20, 100, output=101)], Shape(prefill=1, decode=1))
    chunks = -(-20 * BLOCK // NODE.chunk)
    reading = NODE.read_s(0, 20 * BLOCK) + chunks * NODE.overhead_s
    assert outcome.ttft == pytest.approx(reading, abs=0.005)
    assert outcome.trace.prefill_worker == "p0"
    assert outcome.tpot == pytest.approx(NODE.decode_s(1, 20 * BLOCK), rel=0.1)


def test_scaled_hardware_takes_as_long_for_what_it_stands_for() -> None:
    for start, count in ((0, 1024), (8192, 2048)):
        assert H100_NODE.scaled(8).read_s(start // 8, count // 8) == pytest.approx(H100_NODE.read_s(start, count))
    assert H100_NODE.scaled(8).decode_s(4, 1000) == pytest.approx(H100_NODE.decode_s(4, 8000))
    assert H100_NODE.scaled(8).move_s(100) == pytest.approx(H100_NODE.move_s(800))


def test_a_prefix_is_read_once_and_evicted_when_others_need_the_room() -> None:
    asks = [ask(10.0 * i, 20, 100, output=2) for i in range(3)]
    first, *rest = play(asks, Shape(prefill=1, decode=1))
    assert first.trace.cached_tokens == 0
    assert [o.trace.cached_tokens for o in rest] == [19 * BLOCK] * 2
    big = SMALL.pool_positions // BLOCK - 40
    others = [ask(1000.0 * i, big, 10_000 * i, output=2) for i in (1, 2)]
    outcomes = play([asks[0], *others, ask(4000.0, 20, 100, output=2)], Shape(prefill=1, decode=1, hardware=SMALL))
    assert all(outcome.good for outcome in outcomes)
    assert outcomes[-1].trace.cached_tokens == 0


def test_a_seed_is_the_whole_story() -> None:
    asks = [ask(0.05 * i, 5 + i % 7 * 4, 100 * i, shared=4) for i in range(40)]
    once, again, other = (
        [o.ttft for o in play(asks, Shape(prefill=2, decode=2, routers=2), seed=seed)] for seed in (1, 1, 2)
    )
    assert once == again
    assert once != other


def test_what_is_refused_waits_and_is_served() -> None:
    """A small admission window, small pools: nothing is lost, and nothing held in the end, as the player checks."""
    small = Shape(prefill=1, decode=2, window=NODE.chunk, hardware=SMALL)
    asks = [ask(0.01 * i, 15, 100 * i, output=400) for i in range(25)]
    outcomes = play(asks, small)
    assert all(outcome.good for outcome in outcomes)
    assert max(o.ttft or 0.0 for o in outcomes) > 1.0


def test_a_full_line_turns_away_at_once() -> None:
    asks = [ask(0.0, 15, 100 * i, output=400) for i in range(30)]
    small = Shape(prefill=1, decode=1, hardware=SMALL)
    outcomes = Player(asks, small, settings(queue_limit=5), 1).play()
    turned = [o for o in outcomes if isinstance(o.error, Overloaded)]
    assert turned
    assert all(o.ended == 0.0 for o in turned)
    assert len(turned) + sum(o.good for o in outcomes) == 30


def test_traces_are_read_scaled_and_in_their_rhythm(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = (
        (0, 1024, '[1, 2]'),
        (1000, 1025, '[1, 2, 3]'),
        (3000, 100, '[9]'),
    )  # fmt: skip
    path.write_text(
        "\n".join(
            f'{{"timestamp": {at}, "input_length": {length}, "output_length": 7, "hash_ids": {ids}}}'
            for at, length, ids in rows
        )
    )
    asks = read_trace(path)
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in asks] == [(0, 128, 7), (1, 128, 7), (3, 12, 7)]
    assert asks[0].prompt() == asks[1].prompt()
    assert len(asks[2].prompt()) == 12
    assert [a.at for a in arriving(asks, 0.5)] == [0, 2, 6]
    assert repeated(asks) == 128 / 268


def test_a_short_prompt_takes_decode_a_whole_step() -> None:
    """And, among streams, half of the one that runs: reading is never a fraction of a step."""
    stream, short = ask(0.0, 8, 100, output=400), Ask(1.0, (999,), 8, 2)
    _, read = play([stream, short], Shape(prefill=1, decode=1))
    assert read.trace.prefill_worker == "local"
    step = NODE.decode_s(1, 8 * BLOCK + 60)
    assert read.ttft == pytest.approx(1.5 * step + NODE.read_s(0, 8) + 0.001, rel=0.1)


def test_nothing_is_quicker_than_the_floor() -> None:
    asks = [ask(0.3 * i, 12 + i % 9, 1000 * i, shared=8) for i in range(30)]
    least = floor(asks, NODE)
    assert least.cached == 29 * 8 * BLOCK / sum(a.prompt_tokens for a in asks)
    assert floor(asks, NODE, blocks=4).cached < least.cached
    assert floor(asks[:1], NODE).mean == pytest.approx(play(asks[:1], Shape())[0].ttft, rel=0.02)
    for policy in ("cost", "round_robin"):
        ttft = [outcome.ttft or 0.0 for outcome in play(asks, Shape(prefill=2, decode=2), policy)]
        assert sum(ttft) / len(ttft) >= least.mean
