"""Log-probabilities of given tokens: against float64 and plain sorting, in any pieces, to the bit those of draws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.clock import ManualClock
from cluster.core.errors import IntegrityError
from engine.messages import Row, SampleSpec, Score, Scored, Step
from engine.model.base import SCORED_AT_ONCE, ForwardRow
from engine.model.tracer import TracerModelRunner, reference_logits
from engine.pool import HostMemory
from engine.sampler import sample_row, score_row
from engine.scorer import Scorer
from engine.scoring import Scoring, usable_blocks
from engine.stepper import Stepper
from tests.unit.engine_process.tracer_spec import SPEC

SIZE = 4
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def rows_of(scored: Scored) -> Rows:
    logprobs = np.frombuffer(scored.logprobs, "<f4").reshape(scored.rows, -1)
    ids = np.frombuffer(scored.ids, "<i4").reshape(scored.rows, scored.top)
    return logprobs, ids, np.frombuffer(scored.ranks, "<i4")


@given(
    logits=st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=40),  # whole numbers: many equals
    token=st.integers(0, 39),
    top=st.integers(0, 5),
)
def test_against_a_plain_sort(logits: list[float], token: int, top: int) -> None:
    token %= len(logits)
    top = min(top, len(logits))
    own, likely, ids, rank = score_row(np.array(logits, np.float32), token, top)
    norm = math.log(math.fsum(map(math.exp, logits)))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert own == pytest.approx(logits[token] - norm, abs=1e-6)
    assert ids.tolist() == order[:top]
    assert likely == pytest.approx([logits[i] - norm for i in order[:top]], abs=1e-6)
    assert rank == 1 + order.index(token)


def test_a_token_has_the_same_log_probability_drawn_or_read() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(0, 3, 1000).astype(np.float32)
        [drawn] = sample_row(logits, [SampleSpec(0, 7, 1.0, 1.0, 0, 4)], 9)
        own, likely, ids, _ = score_row(logits, drawn.token, 4)
        assert own == drawn.logprob
        assert list(zip(ids.tolist(), likely.tolist(), strict=True)) == drawn.top


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="largest logit"):
        Scorer([Score(1, 0, [0])]).take(np.array([[0.0, bad]], np.float32))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), cuts=st.lists(st.integers(1, 8), min_size=40))
def test_pieces_may_be_cut_anywhere(sizes: list[int], cuts: list[int]) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (sum(sizes), 30)).astype(np.float32)
    wanted = [Score(at % 3, 0, list(range(at, at + size))) for at, size in enumerate(sizes)]
    scorer, first = Scorer(wanted), 0
    for cut in cuts:
        scorer.take(logits[first : first + cut])
        first += cut
    first = 0
    for score, scored in zip(wanted, scorer.results(), strict=True):
        logprobs, ids, ranks = rows_of(scored)
        for at, token in enumerate(score.targets):
            own, likely, best, rank = score_row(logits[first + at], token, score.top)
            assert logprobs[at].tolist() == np.array([own, *likely], np.float32).tolist()
            assert (ids[at].tolist(), ranks[at]) == (best.tolist(), rank)
        first += len(score.targets)


def stepper() -> tuple[Stepper, TracerModelRunner]:
    model = TracerModelRunner(SPEC, SIZE)
    memory = HostMemory(model.layout, 64, 1, model.layout.block_bytes)
    model.bind(memory.pool)
    return Stepper(model, memory, ManualClock()), model


def test_a_step_scores_its_rows_beside_others() -> None:
    run, _ = stepper()
    ids = [5, 6, 7, 8, 9, 10]
    step = Step(
        1,
        [
            Row(0, 0, ids[:4], 0, [0], True, [], [], score=Score(2, 1, ids[2:5])),
            Row(1, 0, [1, 2], 0, [1], True, [], []),
            Row(2, 0, ids[:3], 0, [2], True, [], [], score=Score(0, 0, ids[1:3])),
        ],
        [],
    )
    done = run.run(step)
    assert (done.errors, sorted(done.scored)) == ({}, [0, 2])
    logits = reference_logits(ids, SPEC)
    for index, first, top in ((0, 1, 2), (2, 0, 0)):
        logprobs, best, ranks = rows_of(done.scored[index])
        for at in range(len(ranks)):
            own, likely, want, rank = score_row(logits[first + at], ids[first + at + 1], top)
            assert logprobs[at].tolist() == np.array([own, *likely], np.float32).tolist()
            assert (best[at].tolist(), ranks[at]) == (want.tolist(), rank)


@pytest.mark.parametrize(
    "score",
    [
        Score(1, -1, [1]), Score(1, 0, []), Score(1, 3, [1]), Score(1, 0, [1] * 4), Score(-1, 0, [1]),
        Score(SPEC.vocab_size + 1, 0, [1]), Score(1, 0, [SPEC.vocab_size]), Score(1, 0, [-1]),
    ],
)  # fmt: skip
def test_a_share_that_fits_no_row_fails_it_alone(score: Score) -> None:
    run, _ = stepper()
    bad, good = Row(0, 0, [1, 2, 3], 0, [0], True, [], [], score=score), Row(1, 0, [1], 0, [1], True, [], [])
    done = run.run(Step(1, [bad, good], []))
    assert list(done.errors) == [0]
    assert not done.scored


def test_few_logits_are_in_memory_at_a_time() -> None:
    """However long the row: all of them at once would be a gigabyte for a large vocabulary."""
    _, model = stepper()
    sizes: list[int] = []
    tokens = [1] * 200
    row = ForwardRow(tokens, 0, list(range(50)), write=True, logits=False, scored=range(3, 200))
    model.run([row], lambda logits: sizes.append(len(logits)))
    assert sum(sizes) == 197
    assert max(sizes) == SCORED_AT_ONCE


@given(length=st.integers(1, 40), chunk=st.integers(1, 12), start=st.integers(1, 40), block=st.integers(1, 8))
def test_chunks_ask_for_each_token_once(length: int, chunk: int, start: int, block: int) -> None:
    """From the longest prefix hit that is allowed, in any chunks: every token from `start` on, in order."""
    tokens = list(range(100, 100 + length))
    scoring = Scoring(0, min(start, length), length)
    computed = usable_blocks(length, block, scoring) * block
    asked: list[int] = []
    while computed < length:
        end = min(computed + chunk, length)
        share = scoring.share(computed, tokens, end)
        if share is not None:
            assert tokens[computed + share.first + 1 :][: len(share.targets)] == share.targets
            asked += share.targets
            scoring.next += len(share.targets)
        computed = end
    assert asked == tokens[min(start, length) :]
    assert scoring.done


def test_a_row_that_begins_too_late_is_our_own_fault() -> None:
    with pytest.raises(IntegrityError, match="cannot tell"):
        Scoring(0, 3, 9).share(3, list(range(9)), 9)


def test_what_is_told_already_lets_a_prefix_be_used() -> None:
    assert usable_blocks(33, 16, None) == usable_blocks(33, 16, Scoring(0, 33, 33)) == 2
    assert [usable_blocks(33, 16, Scoring(0, start, 33)) for start in (1, 16, 17, 32)] == [0, 0, 1, 1]
