"""The parity matrix in float32: every architecture, every path, every border of a block, poisoned pools (I1, I5).

Real worker cores and real engines in one thread. Whatever a test writes is compared with what every other test wrote
under the same prompt and sampling, and judged by transformers (judge.py).
"""

from collections.abc import Iterator

import pytest

from cluster.stubs.session_pb2 import SampleState
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.fakes.world import World
from tests.parity.lab import GREEDY, LOCAL, SAMPLINGS, SEEDED, Asked, B, Lab, end_quietly, prompt
from tests.verify_record import Report

SHORT = [1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1]
LONG = {33 * B - 1: "greedy", 33 * B: "seeded", 33 * B + 1: "uncut"}  # longer than the largest chunk
CACHED = [0, 1, B - 1, B, B + 1]
# Beside the plain ones: one kv head for eight query heads, of a size that hidden_size / heads is not.
SPECIAL: dict[str, dict[str, object]] = {
    "llama-wide": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
}
Streams = list[list[int]]


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *SPECIAL])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, report: Report) -> Iterator[Lab]:
    name: str = request.param
    overrides = {"max_position_embeddings": 1024} | SPECIAL.get(name, {})
    folder = make_checkpoint(tmp_path_factory.mktemp(name), name.removesuffix("-wide"), len(name), **overrides)
    lab = Lab(name, folder)
    yield lab
    figures = lab.ledger.figures
    report(f"{name}: {figures}")
    for text in figures.findings:
        report(f"  {text}")


def _prompt_of(length: int, how: str) -> list[int]:
    """Each way of sampling has its own prompts: in one world none hits what another computed."""
    return prompt(length, list(SAMPLINGS).index(how))


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_every_length_and_chunk(lab: Lab, split: bool, chunk: int) -> None:
    """All at the same time: prompts read while others are written, steps of many rows."""
    world = lab.world(chunk_tokens=chunk)
    cases = [*LONG.items(), *((length, how) for length in SHORT for how in SAMPLINGS)]
    asked = {
        (length, how): lab.ask(world, _prompt_of(length, how), SAMPLINGS[how], prefill=None if split else LOCAL)
        for length, how in cases
    }
    world.run()
    for (length, how), one in asked.items():
        lab.collect(world, one, f"{'split' if split else 'local'}, chunk {chunk}, length {length}, {how}")
        _check_path(world, one, "prefill-0" if split else "local", moved=length // B * B if split else 0)
    lab.ledger.settle()
    end_quietly(world)


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_every_length_and_chunk_alone(lab: Lab, chunk: int) -> None:
    """One after the other: every chunk is cut where the setting says, every step has one row."""
    tokens = 4
    lengths = SHORT if chunk < 512 else [*SHORT, 33 * B - 1]
    for split in (True, False):
        world = lab.world(chunk_tokens=chunk)
        for length in lengths:
            one = lab.ask(world, _prompt_of(length, "greedy"), prefill=None if split else LOCAL, max_tokens=tokens)
            world.run()
            path = f"{'split' if split else 'local'}, alone, chunk {chunk}, length {length}"
            lab.collect(world, one, path, max_tokens=tokens)
            _check_path(world, one, "prefill-0" if split else "local", moved=length // B * B if split else 0)
        end_quietly(world)
    lab.ledger.settle()


@pytest.mark.parametrize(("how", "tail"), [("greedy", 0), ("seeded", 5)])
def test_every_cached_prefix_on_both_sides(lab: Lab, how: str, tail: int) -> None:
    """Every pair of a prefix cached on P and one cached on D, each pair with its own prompt."""
    length, tokens = 5 * B + tail, 6
    last = (length - 1) // B * B  # where the last block begins
    prefixes = [*CACHED, last - 1, last, last + 1, length]
    world = lab.world(chunk_tokens=512)
    pairs = [(on_p, on_d) for on_p in prefixes for on_d in prefixes]
    prompts = {pair: prompt(length, 100 + number) for number, pair in enumerate(pairs)}
    for (on_p, on_d), ids in prompts.items():
        if on_p:
            lab.ask(world, ids[:on_p], max_tokens=1)  # one token: no hand-off, P alone keeps the prefix
        if on_d:
            lab.ask(world, ids[:on_d], max_tokens=1, prefill=LOCAL)
    world.run()
    asked = {pair: lab.ask(world, ids, SAMPLINGS[how], max_tokens=tokens) for pair, ids in prompts.items()}
    world.run()
    for (on_p, on_d), one in asked.items():
        path = f"{on_p} cached on P, {on_d} on D, length {length}, {how}"
        lab.collect(world, one, path, max_tokens=tokens)
        hit_p, hit_d = (min(cached // B, (length - 1) // B) * B for cached in (on_p, on_d))
        _check_path(world, one, "prefill-0", moved=length // B * B - hit_d)
        handed_off = world.answers[one.attempt].handed_off
        assert (handed_off.cached_tokens if handed_off else hit_p) == hit_p
    end_quietly(world)
    bare = lab.world(chunk_tokens=512)
    asked = {
        pair: lab.ask(bare, ids, SAMPLINGS[how], max_tokens=tokens, prefill=LOCAL) for pair, ids in prompts.items()
    }
    bare.run()
    for one in asked.values():
        lab.collect(bare, one, f"nothing cached, local, length {length}, {how}", max_tokens=tokens)
        _check_path(bare, one, "local", moved=0)
    lab.ledger.settle()


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_three_samples_of_one_prompt(lab: Lab, split: bool) -> None:
    """Once with nothing cached, and once more over the prompts that the first round left in the caches."""
    world = lab.world()
    for cached in ("fresh", "cached"):
        asked = {
            (length, how): lab.ask(world, _prompt_of(length, how), sampling, n=3, prefill=None if split else LOCAL)
            for length in SHORT
            for how, sampling in SAMPLINGS.items()
        }
        world.run()
        for (length, how), one in asked.items():
            path = f"n=3, {'split' if split else 'local'}, {cached}, length {length}, {how}"
            streams = lab.collect(world, one, path)
            assert len({tuple(s) for s in streams}) == (1 if how == "greedy" else 3)
    lab.ledger.settle()
    end_quietly(world)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_going_on_from_history(lab: Lab, split: bool) -> None:
    """A new attempt is told what was emitted before, and goes on as if nothing had happened."""
    tokens = B + 6
    cases = [(length, how, n) for n in (1, 2) for length in SHORT[n - 1 :: n] for how in ("greedy", "seeded")]
    first = lab.world()
    wholes = {
        (length, how, n): lab.ask(first, _prompt_of(length, how), SAMPLINGS[how], n=n, max_tokens=tokens, prefill=LOCAL)
        for length, how, n in cases
    }
    first.run()
    streams = {case: lab.collect(first, one, f"the whole, {case}", max_tokens=tokens) for case, one in wholes.items()}
    world = lab.world()
    resumed: list[tuple[Asked, Streams, str]] = []
    for case, one in wholes.items():
        for emitted in (1, 5, B, B + 1) if len(one.history) == 1 else (5, B):
            history = [SampleState(emitted=s[: emitted if i == 0 else 0]) for i, s in enumerate(streams[case])]
            prefill = None if split else LOCAL
            again = lab.ask(world, one.prompt, one.sampling, max_tokens=tokens, history=history, prefill=prefill)
            resumed.append((again, streams[case], f"after {emitted} tokens, {case}"))
    world.run()
    for again, whole, path in resumed:
        assert lab.collect(world, again, path, max_tokens=tokens) == whole, path
    lab.ledger.settle()
    end_quietly(world)


def test_preempted_streams_go_on_with_the_same_tokens(lab: Lab) -> None:
    """Two greedy and two seeded streams in a pool that holds two, and each again in a pool of its own."""
    tokens = 60
    cases = [(tuple(prompt(2 * B, 300 + i)), (GREEDY, SEEDED)[i % 2]) for i in range(4)]
    roomy = lab.world()
    undisturbed = [lab.ask(roomy, ids, sampling, max_tokens=tokens, prefill=LOCAL) for ids, sampling in cases]
    roomy.run()
    for one in undisturbed:
        lab.collect(roomy, one, "never pre-empted", max_tokens=tokens)

    world = lab.world(pool_tokens=12 * B)
    running = [lab.ask(world, ids, sampling, max_tokens=tokens) for ids, sampling in cases]
    preempted = {ids: 0 for ids, _ in cases}
    for _ in range(60):
        world.run(check=True)
        for at, one in enumerate(running):
            answer, key = world.answers[one.attempt], tuple(one.prompt)
            if answer.lost:
                preempted[key] += answer.lost.startswith("preempted")
                history = [SampleState(emitted=[*one.history[0].emitted, *answer.tokens[0]])]
                running[at] = lab.ask(
                    world, key, one.sampling, max_tokens=tokens, history=history, preemptions=preempted[key]
                )
        world.tick(1)
    assert sum(preempted.values()) > 0
    for one in running:
        lab.collect(world, one, f"pre-empted {preempted[tuple(one.prompt)]} times", max_tokens=tokens)
    lab.ledger.settle()
    end_quietly(world)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_prefix_on_one_decode_worker_request_on_the_other(lab: Lab, split: bool) -> None:
    """Two of each: a prefix that one decode worker has helps nobody else, and changes no token."""
    world = lab.world(prefill=2, decode=2)
    length = 5 * B + 3
    cases = [(cached, how) for cached in [*CACHED[1:], 5 * B - 1, 5 * B, 5 * B + 1] for how in ("greedy", "seeded")]
    prompts = [prompt(length, 400 + number) for number in range(len(cases))]
    for ids, (cached, _) in zip(prompts, cases, strict=True):
        lab.ask(world, ids[:cached], max_tokens=1, prefill=LOCAL, decode="decode-0")
    world.run()
    asked: list[tuple[Asked, int, str]] = []
    for number, (ids, (cached, how)) in enumerate(zip(prompts, cases, strict=True)):
        for where in (0, 1):
            holders = [f"prefill-{(number + where + k) % 2}" for k in (0, 1)] if split else LOCAL
            one = lab.ask(world, ids, SAMPLINGS[how], prefill=holders, decode=f"decode-{where}")
            asked.append((one, cached if where == 0 else 0, f"{cached} cached on 0, request on {where}, {how}"))
    world.run()
    for one, cached, path in asked:
        lab.collect(world, one, path)
        worker = world.answers[one.attempt].prefill_on[0] if split else "local"
        assert worker.startswith("prefill-") is split
        _check_path(world, one, worker, moved=(5 * B - cached // B * B) if split else 0)
    lab.ledger.settle()
    end_quietly(world)


def _check_path(world: World, asked: Asked, worker: str, *, moved: int) -> None:
    """The request took the path that the test is about."""
    answer = world.answers[asked.attempt]
    assert answer.prefill_on == [worker]
    assert (answer.handed_off.transferred_tokens if answer.handed_off else 0) == moved
