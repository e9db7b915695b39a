"""A prompt's log-probabilities on every path: each of its tokens once, in order, and the tracer's own numbers.

The judge has no pool and no chunks: it folds the prompt in plain integers and takes the log-softmax in float64.
"""

import math
from functools import lru_cache

import numpy as np
import pytest

from cluster.core.ids import agent_name
from cluster.scores import Scores, messages, read
from cluster.stubs.common_pb2 import Blame, PromptLogprobs, Sampling, ScorePrompt
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, Job, JobDone
from cluster.stubs.session_pb2 import SampleState
from engine.model.tracer import reference_logits
from prefill_worker.effects import ToDecode
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import SPEC, B, config, expected, prompt

TOP = 3


@lru_cache(maxsize=32)
def right(ids: tuple[int, ...]) -> list[tuple[float, int, list[int]]]:
    """Of each token but the first: log-probability, rank, and the likeliest tokens in its place."""
    rows = []
    for logits, token in zip(reference_logits(list(ids), SPEC).astype(float), ids[1:], strict=False):
        order = sorted(range(SPEC.vocab_size), key=lambda i, logits=logits: (-logits[i], i))  # type: ignore[misc]
        norm = math.log(math.fsum(np.exp(logits - logits.max()))) + logits.max()
        rows.append((logits[token] - norm, 1 + order.index(token), order[:TOP]))
    return rows


def told(world: World, attempt: str, start: int = 1, top: int = TOP) -> list[Scores]:
    """What the router has heard, in order and without a gap."""
    heard = [e.scored for e in world.answers[attempt].events if e.WhichOneof("message") == "scored"]
    parts = [read(message, top, SPEC.vocab_size) for message in heard]
    for part in parts:
        assert part.start == start
        start = part.end
    return parts


def check(world: World, attempt: str, ids: list[int], start: int = 1) -> None:
    """All that was asked for has come, once, and is right."""
    parts = told(world, attempt, start)
    assert (parts[-1].end if parts else start) == len(ids)
    rows = right(tuple(ids))
    for part in parts:
        for at in range(len(part.ranks)):
            logprob, rank, likely = rows[part.start + at - 1]
            assert part.logprobs[at, 0] == pytest.approx(logprob, abs=1e-5)
            assert part.ranks[at] == rank
            assert part.ids[at].tolist() == likely
            if rank <= TOP:
                assert part.logprobs[at, rank] == part.logprobs[at, 0]


def quiet(world: World) -> None:
    world.tick(6)
    world.run()
    world.assert_quiet()


def submit(world: World, ids: list[int], max_tokens: int, *, start: int = 1, split: bool = True, n: int = 1) -> str:
    score = ScorePrompt(top=TOP, start=start) if len(ids) > 1 else None
    prefill: list[str] | None = None if split else []
    return world.submit(ids, max_tokens, prefill=prefill, n=n, ignore_eos=True, score=score)


@pytest.mark.parametrize("length", [1, 2, B, B + 1, 4 * B - 1, 4 * B + 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_every_length(split: bool, max_tokens: int, length: int) -> None:
    """Twice: what the first left in the caches says nothing of the tokens behind it, and is not used."""
    world = World(config(chunk_tokens=24), seed=length)
    ids = prompt(length)
    for _ in range(2):
        attempt = submit(world, ids, max_tokens, split=split)
        world.run(check=True)
        answer = world.answers[attempt]
        assert not answer.lost
        assert answer.tokens[0] == expected(ids, max_tokens)
        assert answer.ends == {0: "length"}
        check(world, attempt, ids)
        if answer.handed_off is not None:
            assert answer.handed_off.cached_tokens == 0
    quiet(world)


def test_what_was_scored_is_a_prefix_for_others() -> None:
    world = World(config())
    ids = prompt(5 * B)
    submit(world, ids, 4)
    world.run()
    other = world.submit(ids, 4, ignore_eos=True)
    world.run()
    assert world.answers[other].handed_off.cached_tokens == 4 * B
    assert world.answers[other].tokens[0] == expected(ids, 4)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_several_samples_and_prompts_beside_others(split: bool) -> None:
    """Once for each prompt, however many samples it has; who asked for nothing is told nothing."""
    world = World(config(chunk_tokens=24), seed=3)
    prompts = [prompt(3 * B + extra, extra) for extra in range(4)]
    asked = [submit(world, ids, 3, split=split, n=3) for ids in prompts[:3]]
    plain = world.submit(prompts[3], 3, prefill=None if split else [], ignore_eos=True)
    world.run(check=True)
    for attempt, ids in zip(asked, prompts, strict=False):
        check(world, attempt, ids)
        assert world.answers[attempt].tokens[1] == expected(ids, 3, index=1)
    assert told(world, plain) == []
    assert world.answers[plain].tokens[0] == expected(prompts[3], 3)
    quiet(world)


def logprobs_arrived(world: World, attempt: str) -> int:
    return sum(e.WhichOneof("message") == "scored" for e in world.answers[attempt].events)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_the_prefill_worker_dies_in_mid_prompt(seed: int, others: int, max_tokens: int) -> None:
    """The next one, or decode itself, goes on where the first stopped: nothing is told twice, nothing is missing."""
    world = World(config(chunk_tokens=16), prefill=1 + others, seed=seed)
    ids = prompt(9 * B + 5)
    attempt = submit(world, ids, max_tokens)
    while logprobs_arrived(world, attempt) < 2 + seed:
        assert world.step()
    world.kill_prefill("prefill-0")
    world.run(check=True)
    check(world, attempt, ids)
    answer = world.answers[attempt]
    assert answer.prefill_on == ["prefill-0", f"prefill-{others}" if others else "local"]
    assert answer.tokens[0] == expected(ids, max_tokens)
    quiet(world)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("start", [2, B, B + 1, 3 * B + 7])
def test_another_decode_worker_is_asked_for_the_rest_alone(start: int, split: bool) -> None:
    """A prefix that is cached may cover what was told already."""
    world = World(config(chunk_tokens=16))
    ids = prompt(4 * B)
    submit(world, ids, 1, split=split)
    world.run()
    attempt = submit(world, ids, 3, start=start, split=split)
    world.run(check=True)
    check(world, attempt, ids, start)
    assert world.answers[attempt].tokens[0] == expected(ids, 3)
    where = world.prefill["prefill-0"].counters if split else world.decode["decode-0"].state.counters
    assert where["prefix_hit_tokens"] == (start - 1) // B * B
    quiet(world)


@pytest.mark.parametrize("broken_after", [1, 3])
def test_a_session_that_breaks_is_told_the_rest(broken_after: int) -> None:
    world = World(config(chunk_tokens=16), seed=broken_after)
    ids = prompt(6 * B)
    attempt = submit(world, ids, 3)
    while logprobs_arrived(world, attempt) < broken_after:
        assert world.step()
    world.hang_up()
    world.run()
    world.come_back()
    world.run(check=True)
    check(world, attempt, ids)
    assert world.answers[attempt].tokens[0] == expected(ids, 3)
    quiet(world)


def test_it_is_cancelled_in_mid_prompt() -> None:
    world = World(config(chunk_tokens=16))
    for split in (True, False):
        attempt = submit(world, prompt(6 * B), 3, split=split)
        while not logprobs_arrived(world, attempt):
            assert world.step()
        world.cancel(attempt)
        world.run(check=True)
        world.answers[attempt].lost = "cancelled"
    quiet(world)


def lying(world: World, lie: str) -> None:
    """Make prefill-0 keep its log-probabilities, or tell others."""
    core = world.prefill["prefill-0"]
    honest = core.take_effects

    def take_effects() -> list[object]:
        effects: list[object] = []
        for effect in honest():
            if isinstance(effect, ToDecode) and effect.message.WhichOneof("message") == "scored":
                scored = PromptLogprobs()
                scored.CopyFrom(effect.message.scored)
                if lie == "none":
                    continue
                if lie == "nan":
                    scored.logprobs = np.full(len(scored.logprobs) // 4, np.nan, "<f4").tobytes()
                if lie == "shifted":
                    scored.start += 1
                if lie == "fewer alternatives":
                    scored.top -= 1
                if lie == "cut":
                    scored.ranks = scored.ranks[:-1]
                if lie == "token ids":
                    scored.ids = np.full(len(scored.ids) // 4, SPEC.vocab_size, "<i4").tobytes()
                effects.append(ToDecode(effect.link, FromPrefill(scored=scored)))
            else:
                effects.append(effect)
        return effects

    core.take_effects = take_effects  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("lie", ["none", "nan", "shifted", "fewer alternatives", "cut", "token ids"])
def test_a_prefill_worker_that_tells_others_is_left(lie: str, max_tokens: int) -> None:
    world = World(config(chunk_tokens=16), prefill=2)
    ids = prompt(3 * B + 2)
    lying(world, lie)
    attempt = submit(world, ids, max_tokens)
    world.run(check=True)
    check(world, attempt, ids)
    assert world.answers[attempt].tokens[0] == expected(ids, max_tokens)
    assert world.decode["decode-0"].state.counters["handoff_left: told other log-probabilities"] == 1
    quiet(world)


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (ScorePrompt(top=-1, start=1), "most likely"),
        (ScorePrompt(top=SPEC.vocab_size + 1, start=1), "most likely"),
        (ScorePrompt(top=1, start=0), "not within"),
        (ScorePrompt(top=1, start=B + 1), "not within"),
    ],
)
def test_what_nobody_can_tell_is_refused_for_good(score: ScorePrompt, why: str) -> None:
    world = World(config())
    attempt = world.submit(prompt(B), 2, score=score)
    world.run()
    assert why in world.answers[attempt].lost
    job = Job(attempt="x", tokens=prompt(B), score=score, sampling=Sampling(top_p=1.0, logprobs=-1), deadline_s=9.0)
    core = world.prefill["prefill-0"]
    core.from_decode("decode-0", FromDecodePeer(job=job), world.clock.now())
    [failed] = [e.message.failed for e in core.take_effects() if isinstance(e, ToDecode)]
    assert failed.blame == Blame.BLAME_REQUEST
    assert why in failed.reason


def test_nothing_to_write_and_nothing_to_tell_ends_at_once() -> None:
    world = World(config())
    attempt = world.submit(prompt(3 * B), 0, n=2)
    world.run(check=True)
    assert world.answers[attempt].ends == {0: "length", 1: "length"}
    assert not world.answers[attempt].prefill_on
    quiet(world)


def test_a_finished_sample_cannot_go_on_without_max_tokens() -> None:
    world = World(config())
    attempt = world.submit(prompt(B), 0, histories=[SampleState(emitted=[5])])
    world.run()
    assert "longer than max_tokens" in world.answers[attempt].lost


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("seen", [1, 2, 4])
def test_a_prompt_that_is_given_back_in_mid_reading_is_told_on_from_there_elsewhere(
    seen: int, n: int, split: bool
) -> None:
    world = World(config(chunk_tokens=16), prefill=2, decode=2, seed=seen)
    ids = prompt(7 * B + 3)
    attempt = submit(world, ids, 4, split=split, n=n)
    while logprobs_arrived(world, attempt) < seen:
        assert world.step()
    core = world.decode["decode-0"]
    core._decoding.give_back(core.state.attempts[attempt], draining=False)
    world._decode_effects("decode-0")
    world.run(check=True)
    assert world.answers[attempt].lost.startswith("preempted")
    at = told(world, attempt)[-1].end
    assert at > 1
    again = world.submit(
        ids, 4, decode="decode-1", prefill=None if split else [], n=n, ignore_eos=True, preemptions=1,
        score=ScorePrompt(top=TOP, start=at) if at < len(ids) else None, histories=[SampleState() for _ in range(n)],
    )  # fmt: skip
    world.run(check=True)
    if at < len(ids):
        check(world, again, ids, at)
    for index in range(n):
        assert world.answers[again].tokens[index] == expected(ids, 4, index=index)
    quiet(world)


@pytest.mark.parametrize("top", [0, 1, 20, 5000])
def test_messages_are_bounded_and_lose_nothing(top: int) -> None:
    rows = 700 if top < 100 else 9
    rng = np.random.default_rng(top)
    logprobs = -rng.random((rows, 1 + top), np.float32)
    ids = rng.integers(0, 5000, (rows, top)).astype("<i4")
    ranks = rng.integers(1, 5001, rows).astype("<i4")
    sent = list(messages("a", 7, top, logprobs.tobytes(), ids.tobytes(), ranks.tobytes()))
    assert all(message.ByteSize() < 70_000 for message in sent)
    parts = [read(message, top, 5001) for message in sent]
    assert [part.start for part in parts] == [7, *(part.end for part in parts[:-1])]
    assert np.array_equal(np.concatenate([part.logprobs for part in parts]), logprobs)
    assert np.array_equal(np.concatenate([part.ids for part in parts]), ids)
    assert np.array_equal(np.concatenate([part.ranks for part in parts]), ranks)


def test_a_prompt_told_done_before_it_is_scored_is_read_again() -> None:
    """JobDone without the log-probabilities that were asked for: nothing is taken from such a worker."""
    world = World(config(chunk_tokens=16), prefill=2)
    ids = prompt(2 * B + 2)
    attempt = submit(world, ids, 0)
    while not any(e.WhichOneof("message") == "prefill_on" for e in world.answers[attempt].events):
        assert world.step()
    core = world.decode["decode-0"]
    done = FromPrefill(done=JobDone(attempt=attempt))
    core.from_prefill(agent_name("prefill-0", 1), done, world.clock.now())
    world.run(check=True)
    check(world, attempt, ids)
    quiet(world)
