"""Outboxes: first tokens and ends leave at once, everything else at most once per emit interval."""

from cluster.stubs.common_pb2 import TokenLogprob
from decode_worker.outbox import Outbox


def test_tokens_are_joined_into_one_message_per_interval() -> None:
    outbox = Outbox(0.005)
    outbox.add_token("a", 0, 0, 7, None, "")
    assert outbox.due(1.0) == 1.0
    first = outbox.flush(1.0)
    assert first is not None
    for offset in (1, 2, 3):
        outbox.add_token("a", 0, offset, 7 + offset, None, "")
    outbox.add_token("b", 1, 5, 40, None, "")
    assert outbox.flush(1.004) is None
    second = outbox.flush(1.0051)
    assert second is not None
    assert [(r.attempt, r.index, r.offset, list(r.ids)) for r in second.tokens.runs] == [
        ("a", 0, 1, [8, 9, 10]),
        ("b", 1, 5, [40]),
    ]
    assert outbox.due(9.0) is None


def test_an_end_leaves_at_once_with_the_tokens_before_it() -> None:
    outbox = Outbox(10.0)
    outbox.add_token("a", 0, 0, 1, None, "")
    outbox.flush(0.0)
    outbox.add_token("a", 0, 1, 2, None, "")
    assert outbox.flush(0.1) is None
    outbox.add_token("a", 0, 2, 3, None, "length")
    message = outbox.flush(0.2)
    assert message is not None
    (run,) = message.tokens.runs
    assert (list(run.ids), run.end) == ([2, 3], "length")


def test_logprobs_stay_beside_their_tokens() -> None:
    outbox = Outbox(0.0)
    outbox.add_token("a", 0, 0, 1, TokenLogprob(logprob=-0.5), "")
    outbox.add_token("a", 0, 1, 2, TokenLogprob(logprob=-1.5), "")
    message = outbox.flush(0.0)
    assert message is not None
    assert [p.logprob for p in message.tokens.runs[0].logprobs] == [-0.5, -1.5]
