"""Outboxes: first tokens and ends leave at once, everything else at most once per emit interval."""

from cluster.stubs.common_pb2 import TokenLogprob
from cluster.stubs.session_pb2 import TokenRun
from decode_worker.outbox import Outbox


def token(
    attempt: str, index: int, offset: int, token: int, logprob: TokenLogprob | None = None, end: str = ""
) -> TokenRun:
    logprobs = [] if logprob is None else [logprob]
    return TokenRun(attempt=attempt, index=index, offset=offset, ids=[token], logprobs=logprobs, end=end)


def test_tokens_are_joined_into_one_message_per_interval() -> None:
    outbox = Outbox(0.005)
    outbox.add(token("a", 0, 0, 7))
    assert outbox.due(1.0) == 1.0
    first = outbox.flush(1.0)
    assert first is not None
    for offset in (1, 2, 3):
        outbox.add(token("a", 0, offset, 7 + offset))
    outbox.add(token("b", 1, 5, 40))
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
    outbox.add(token("a", 0, 0, 1))
    outbox.flush(0.0)
    outbox.add(token("a", 0, 1, 2))
    assert outbox.flush(0.1) is None
    outbox.add(token("a", 0, 2, 3, end="length"))
    message = outbox.flush(0.2)
    assert message is not None
    (run,) = message.tokens.runs
    assert (list(run.ids), run.end) == ([2, 3], "length")


def test_logprobs_stay_beside_their_tokens() -> None:
    outbox = Outbox(0.0)
    outbox.add(token("a", 0, 0, 1, TokenLogprob(logprob=-0.5)))
    outbox.add(token("a", 0, 1, 2, TokenLogprob(logprob=-1.5)))
    message = outbox.flush(0.0)
    assert message is not None
    assert [p.logprob for p in message.tokens.runs[0].logprobs] == [-0.5, -1.5]
