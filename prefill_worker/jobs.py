"""Jobs: prompts that decode workers want read (DESIGN §4.6-4.7).

    1. accepted   every block of the prompt is reserved, prefix hits are pinned
    2. checking   the hits are digested again; the engine makes the grammar ready, where there is one
    3. running    chunk by chunk; after each one its log-probabilities are told, where they are wanted, and the blocks
                  it filled are offered
    4. done       first tokens are out; offered blocks stay pinned until they are taken, or for a while
A job leaves by being taken, cancelled, failed, by the loss of its link, or when its pins expire; then it owns nothing.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.stubs.common_pb2 import TokenLogprob, TopToken
from cluster.stubs.link_pb2 import First, FirstToken, OfferedBlock
from cluster.stubs.link_pb2 import Job as JobMessage
from engine.asked import sampling_problem, scoring_of, scoring_problem
from engine.messages import Sampled
from engine.scoring import Scoring
from engine.sequence import MAX_SAMPLES, Sequence


class Phase(Enum):
    CHECKING = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Job:
    """One job of one link."""

    link: str
    message: JobMessage
    sequence: Sequence
    prefix_blocks: int
    hit_digests: list[bytes]  # of the prefix hits, as they were published
    arrival: float
    deadline: float
    phase: Phase = Phase.CHECKING
    awaited: int = 0  # answers of the engine, before it may run
    next_offer: int = 0  # block index; everything before was offered or is not wanted
    digests: dict[int, bytes] = field(default_factory=dict)  # of blocks not offered yet
    offered: dict[int, OfferedBlock] = field(default_factory=dict)  # by block id
    pinned_until: float = 0.0

    @property
    def id(self) -> tuple[str, str]:
        return (self.link, self.message.attempt)

    @property
    def remaining(self) -> int:
        """Prompt positions still to be computed."""
        return 0 if self.phase is Phase.DONE else max(0, len(self.sequence.tokens) - self.sequence.computed)


def scoring(job: JobMessage) -> Scoring | None:
    """What the job asks of the prompt's own tokens."""
    return scoring_of(job.score, _prompt(job)) if job.HasField("score") else None


def _prompt(job: JobMessage) -> int:
    """Where the prompt ends and the history begins."""
    return job.prompt_tokens or len(job.tokens)


def first_tokens(job: Job, sampled: list[Sampled], block_size: int) -> First:
    """The job's first tokens, one for each sample that was asked for."""
    tokens = []
    for index, drawn in zip(job.message.sample_indices, sampled, strict=True):
        token = FirstToken(index=index, id=drawn.token)
        if drawn.logprob is not None:
            top = [TopToken(id=i, logprob=p) for i, p in drawn.top]
            token.logprob.CopyFrom(TokenLogprob(logprob=drawn.logprob, top=top))
        tokens.append(token)
    return First(attempt=job.message.attempt, tokens=tokens, cached_tokens=job.prefix_blocks * block_size)


def job_problem(job: JobMessage, *, vocab_size: int, max_context: int, chunk_tokens: int) -> str | None:
    """Why a job can never be done by any worker of this model, or None."""
    if not job.attempt or not job.tokens:
        return "a job needs an attempt id and tokens"
    if len(job.tokens) > max_context:
        return f"{len(job.tokens)} tokens exceed the context of {max_context}"
    if any(not 0 <= token < vocab_size for token in job.tokens):
        return f"a token id is outside the vocabulary of {vocab_size}"
    indices = set(job.sample_indices)
    if len(indices) != len(job.sample_indices) or len(indices) > MAX_SAMPLES or any(i < 0 for i in indices):
        return f"sample indices must be distinct, not negative, and at most {MAX_SAMPLES}"
    if not 0 <= job.first_position <= len(job.tokens):
        return f"first_position {job.first_position} is not within {len(job.tokens)} tokens"
    if not math.isfinite(job.deadline_s):
        return "deadline_s must be finite"
    if not 0 <= job.prompt_tokens <= len(job.tokens):
        return f"a prompt of {job.prompt_tokens} is not within {len(job.tokens)} tokens"
    if job.HasField("score") and (problem := scoring_problem(job.score, _prompt(job), vocab_size, chunk_tokens)):
        return problem
    if not job.sample_indices:
        return None
    if any(not 0 <= token < vocab_size for token in job.stop_token_ids):
        return f"a stop token id is outside the vocabulary of {vocab_size}"
    return sampling_problem(job.sampling, vocab_size)
