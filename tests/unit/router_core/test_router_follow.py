"""Token runs: each token once, in order, whatever is repeated; what contradicts changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.keys import KeyChain, root_key
from cluster.stubs.common_pb2 import PromptLogprobs, ScorePrompt
from cluster.stubs.common_pb2 import TokenLogprob as WireLogprob
from cluster.stubs.session_pb2 import HandedOff, PrefillOn, TokenRun
from router.follow import Follow, Phase, ProtocolBreach
from router.lanes import Entry
from router.placement import Demand, Placement, Shape, WorkerLoad
from router.records import record_of
from router.requests import Request, TokenEvent, TokenLogprob, Trace

SHAPE = Shape(1, (2, 2, 8, 4, "float32"), b"weights")
DECODE = WorkerLoad("d0:1", "d0", 5, SHAPE, max_context=100, num_blocks=20, room_blocks=20)
PREFILL = WorkerLoad("p0:1", "p0", 6, SHAPE, max_context=100, num_blocks=20)
PLACEMENT = Placement(DECODE, (PREFILL,), False, 64, 1.0)


def following(n: int = 1, max_tokens: int = 10, prompt: int = 9) -> Follow:
    request = Request("r", "public", tuple(range(prompt)), max_tokens, n, salt=b"tenant")
    return Follow(request, record_of(request, Trace(), 10.0), Entry("r", 1), now=10.0)


def demand(follow: Follow) -> Demand:
    return follow.demand(64, may_force_local=False)


def start(follow: Follow, now: float = 11.0) -> None:
    follow.start(PLACEMENT, demand(follow), now)


def run(offset: int, ids: list[int], end: str = "", index: int = 0) -> TokenRun:
    return TokenRun(attempt="r.1", index=index, offset=offset, ids=ids, end=end)


@pytest.mark.parametrize(
    ("second", "new", "end"),
    [
        (run(3, [4, 5]), (4, 5), None),
        (run(0, [1, 2, 3, 4]), (4,), None),
        (run(2, [3], "stop"), (), "stop"),
        (run(3, [], "eos"), (), "eos"),
        (run(1, [2, 3, 4], "length"), (4,), "length"),
    ],
)
def test_what_is_new_is_delivered_once(second: TokenRun, new: tuple[int, ...], end: str | None) -> None:
    follow = following()
    start(follow)
    assert follow.take(run(0, [1, 2, 3]), 12.0) == TokenEvent(0, (1, 2, 3))
    assert follow.take(second, 13.0) == TokenEvent(0, new, (), end)  # type: ignore[arg-type]
    assert follow.samples[0].finished == (end is not None)
    assert follow.trace.timings_ms["ttft"] == 2000.0


@pytest.mark.parametrize("repeated", [run(0, [1, 2]), run(1, [2, 3]), run(3, []), run(2, [3])])
def test_a_repetition_says_nothing(repeated: TokenRun) -> None:
    follow = following()
    start(follow)
    follow.take(run(0, [1, 2, 3]), 12.0)
    assert follow.take(repeated, 13.0) is None
    assert follow.samples[0].emitted == [1, 2, 3]


@pytest.mark.parametrize(
    "breach",
    [
        run(4, [5]),
        run(0, [1, 9]),
        run(1, [2], "eos"),
        run(-1, [1, 2]),
        run(3, [4], "because"),
        run(3, [4], index=1),
        run(3, [4], index=-1),
        run(3, [4] * 8),
        TokenRun(offset=3, ids=[4, 5], logprobs=[WireLogprob(logprob=-1.0)]),
    ],
)
def test_a_gap_or_contradiction_raises_and_changes_nothing(breach: TokenRun) -> None:
    follow = following()
    start(follow)
    follow.take(run(0, [1, 2, 3]), 12.0)
    with pytest.raises(ProtocolBreach):
        follow.take(breach, 13.0)
    assert follow.samples[0].emitted == [1, 2, 3]
    assert not follow.samples[0].finished


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_any_overlapping_runs_give_the_sequence(cuts: list[tuple[int, int]]) -> None:
    follow = following(max_tokens=30)
    start(follow)
    whole = list(range(100, 130))
    got: list[int] = []
    for a, b in [*cuts, (0, 30)]:
        offset, until = min(a, len(got)), max(a, b)
        event = follow.take(run(offset, whole[offset:until], "length" if until == 30 else ""), 12.0)
        got.extend(event.ids if event else ())
        assert follow.samples[0].emitted == got == whole[: len(got)]
    assert follow.complete


def test_logprobs_follow_their_tokens() -> None:
    follow = following()
    start(follow)
    follow.take(run(0, [1]), 12.0)
    logprobs = [WireLogprob(logprob=-float(i)) for i in range(1, 4)]
    event = follow.take(TokenRun(offset=0, ids=[1, 2, 3], logprobs=logprobs), 12.0)
    assert event == TokenEvent(0, (2, 3), (TokenLogprob(-2.0), TokenLogprob(-3.0)))


def test_the_next_attempt_carries_what_was_delivered() -> None:
    follow = following(n=2)
    start(follow)
    follow.take(run(0, [1, 2, 3]), 12.0)
    follow.take(run(0, [7], "eos", index=1), 12.0)
    assert follow.leave().id == "r.1"
    assert demand(follow).histories == (3,)
    assert demand(follow).fingerprint == b"weights"
    start(follow, 14.0)
    submit = follow.submit(PLACEMENT, 15.0)
    assert [(list(s.emitted), s.finished) for s in submit.samples] == [([1, 2, 3], False), ([7], True)]
    assert (submit.attempt, submit.deadline_s, submit.waited_s) == ("r.2", 595.0, 5.0)
    assert (submit.prefill[0].worker, submit.prefill[0].epoch, submit.prefill[0].address) == ("p0", 6, "p0:1")
    assert (submit.max_tokens, submit.sampling.logprobs, submit.salt) == (10, -1, b"tenant")


def test_a_sample_whose_end_was_lost_ends_by_itself() -> None:
    follow = following(n=2, max_tokens=2)
    start(follow)
    follow.take(run(0, [1, 2]), 12.0)
    follow.take(run(0, [1], index=1), 12.0)
    follow.leave()
    assert follow.exhausted() == [TokenEvent(0, (), (), "length")]
    assert follow.exhausted() == []
    assert not follow.complete


def test_illegal_moves_raise_and_change_nothing() -> None:
    follow = following()
    with pytest.raises(RuntimeError):
        follow.leave()
    start(follow)
    with pytest.raises(RuntimeError):
        start(follow)
    assert follow.phase is Phase.RUNNING
    follow.end()
    with pytest.raises(RuntimeError):
        start(follow)


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prefix_hit_leaves_at_least_one_position(prompt: int, blocks: int) -> None:
    chain = KeyChain(root_key(b"weights", salt=b"tenant"), 4)
    assert following(prompt=prompt).keys_of(SHAPE) == chain.extend(list(range(prompt)))[:blocks]


def test_history_is_part_of_the_keys_of_a_single_sample() -> None:
    single, double = following(n=1, prompt=4), following(n=2, prompt=4)
    for follow in (single, double):
        start(follow)
        follow.take(run(0, [1, 2, 3, 4, 5]), 12.0)
    chain = KeyChain(root_key(b"weights", salt=b"tenant"), 4)
    assert single.keys_of(SHAPE) == chain.extend([0, 1, 2, 3, 1, 2, 3, 4])
    assert double.keys_of(SHAPE) == []


def test_the_trace_tells_the_first_attempt_and_adds_up_bytes() -> None:
    follow = following()
    handed = HandedOff(
        kv_bytes=100, cached_tokens=4, offer_wait_s=0.1, wire_s=0.2, verify_s=0.3, exposed_s=0.4, prefill_s=0.5
    )
    for cached, worker in ((4, "p0"), (8, "local")):
        start(follow)
        follow.accepted(11.25)
        follow.accepted(99.0)
        follow.on_prefill(PrefillOn(worker=worker, cached_tokens=cached))
        handed.cached_tokens = cached
        follow.on_handed_off(handed)
        follow.leave()
    trace = follow.trace
    assert (trace.attempts, trace.cached_tokens, trace.kv_bytes, trace.prefill_worker) == (2, 4, 200, "local")
    assert trace.timings_ms == pytest.approx(
        {
            "queue": 1000,
            "placed": 250,
            "prefill": 500,
            "transfer": 500,
            "transfer_wire": 200,
            "transfer_verify": 300,
            "transfer_publish": 0,
            "exposed_transfer": 400,
            "offer_wait": 100,
        }
    )


def scored(start: int, rows: int, top: int = 1, attempt: str = "r.1") -> PromptLogprobs:
    logprobs = np.arange(start, start + rows, dtype="<f4")[:, None] * np.float32(-1) - np.arange(1 + top, dtype="<f4")
    ids, ranks = np.full((rows, top), start, "<i4"), np.full(rows, 2, "<i4")
    arrays = (logprobs.tobytes(), ids.tobytes(), ranks.tobytes())
    return PromptLogprobs(attempt=attempt, start=start, top=top, logprobs=arrays[0], ids=arrays[1], ranks=arrays[2])


def scoring(prompt: int = 9, max_tokens: int = 10) -> Follow:
    request = Request("r", "public", tuple(range(prompt)), max_tokens, prompt_logprobs=1)
    follow = Follow(request, record_of(request, Trace(), 10.0), Entry("r", 1), now=10.0)
    start(follow)
    return follow


def test_log_probabilities_of_the_prompt_are_delivered_once() -> None:
    follow = scoring()
    assert follow.submit(PLACEMENT, 11.0).score == ScorePrompt(top=1, start=1)
    first, nothing, rest = (follow.take_scores(scored(*part), 50) for part in ((1, 3), (2, 2), (2, 7)))
    assert first is not None
    assert (first.start, first.logprobs[:, 0].tolist()) == (1, [-1, -2, -3])
    assert nothing is None
    assert rest is not None
    assert (rest.start, rest.end, rest.logprobs[:, 0].tolist()) == (4, 9, [-4, -5, -6, -7, -8])
    assert follow.take_scores(scored(1, 8), 50) is None
    assert follow.take(run(0, [1]), 12.0) == TokenEvent(0, (1,))


@pytest.mark.parametrize(
    "breach", [scored(0, 1), scored(5, 1), scored(4, 6), scored(4, 1, top=2), scored(4, 1, top=0), PromptLogprobs()]
)
def test_log_probabilities_that_contradict_change_nothing(breach: PromptLogprobs) -> None:
    follow = scoring()
    follow.take_scores(scored(1, 3), 50)
    with pytest.raises(ProtocolBreach):
        follow.take_scores(breach, 50)
    assert follow.next_scored == 4


@pytest.mark.parametrize("token", [run(0, [1]), run(0, [], "length")])
def test_a_token_before_the_prompt_is_told_is_a_breach(token: TokenRun) -> None:
    follow = scoring()
    follow.take_scores(scored(1, 3), 50)
    with pytest.raises(ProtocolBreach):
        follow.take(token, 12.0)
    with pytest.raises(ProtocolBreach, match="nobody asked"):
        following().take_scores(scored(1, 3), 50)


def test_the_next_attempt_asks_for_the_rest_alone_and_keeps_the_weights() -> None:
    """What a cache holds covers no more than what was told; placement counts it so."""
    follow = scoring()
    assert (follow.keys_of(SHAPE), demand(follow).fingerprint) == ([], None)
    follow.take_scores(scored(1, 4), 50)
    assert follow.resume().next_scored == 5
    follow.leave()
    assert len(follow.keys_of(SHAPE)) == 1
    assert demand(follow).fingerprint == b"weights"
    start(follow)
    assert follow.submit(PLACEMENT, 12.0).score == ScorePrompt(top=1, start=5)
    follow.take_scores(scored(5, 4), 50)
    assert follow.resume().next_scored == 9, "all of them: none is to be told again"
    assert len(follow.keys_of(SHAPE)) == 2
    follow.leave()
    start(follow)
    assert not follow.submit(PLACEMENT, 13.0).HasField("score")


def test_a_request_that_writes_nothing_is_complete_when_all_is_told() -> None:
    follow = scoring(max_tokens=0)
    assert follow.exhausted() == []
    follow.take_scores(scored(1, 8), 50)
    assert follow.exhausted() == [TokenEvent(0, (), (), "length")]
    assert follow.complete
