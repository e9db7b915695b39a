"""What this worker asks of a prefill worker, and whether an answer is one to that."""

from cluster.scores import read
from cluster.stubs.common_pb2 import PromptLogprobs, ScorePrompt
from cluster.stubs.link_pb2 import First, Job, Offer
from decode_worker.attempts import Attempt
from decode_worker.transfer import Transfer


def make_job(transfer: Transfer, now: float, block_size: int) -> Job:
    """The rest of the prompt, and what only its last positions give: first tokens, unless they are known.

    Where nothing is decoded after them, no block is wanted.
    """
    attempt = transfer.attempt
    transfer.asked = undrawn = [] if transfer.first_known else [s.index for s in attempt.undrawn]
    single_token = all(attempt.submit.max_tokens - len(s.emitted) == 1 for s in attempt.live)
    unwanted = attempt.reads_only or (single_token and undrawn)
    scoring = attempt.scoring
    return Job(
        attempt=attempt.id,
        tokens=attempt.prompt_ids,
        first_position=len(attempt.prompt_ids) if unwanted else transfer.handoff.verified_blocks * block_size,
        sample_indices=undrawn,
        sampling=attempt.submit.sampling,
        salt=attempt.submit.salt,
        deadline_s=attempt.deadline - now,
        prompt_tokens=len(attempt.submit.prompt),
        stop_token_ids=attempt.submit.stop_token_ids,
        score=ScorePrompt(top=scoring.top, start=scoring.next) if scoring is not None and not scoring.done else None,
    )


def answers(message: First, transfer: Transfer, vocab_size: int) -> bool:
    """Whether these are the first tokens that were asked for, after all that was asked of the prompt."""
    bare = transfer.attempt.submit.sampling.logprobs < 0
    named = [t.index for t in message.tokens if 0 <= t.id < vocab_size and (bare or t.HasField("logprob"))]
    return sorted(named) == transfer.asked and len(named) == len(message.tokens) and transfer.attempt.scored


def follows(message: PromptLogprobs, attempt: Attempt, vocab_size: int) -> bool:
    """Whether these are the next log-probabilities that are wanted of the prompt."""
    scoring = attempt.scoring
    if scoring is None or message.start != scoring.next:
        return False
    try:
        return read(message, scoring.top, vocab_size).end <= scoring.end
    except ValueError:
        return False


def is_told(offer: Offer, attempt: Attempt, block_size: int) -> bool:
    """Whether the log-probabilities that come with computing these blocks are known: without them nobody goes on."""
    end = offer.first_position + len(offer.blocks) * block_size
    return attempt.scored or (attempt.scoring is not None and end < attempt.scoring.next)
