"""Jobs: prompts that decode workers want read (DESIGN §4.6-4.7).

    1. accepted   every block of the prompt is reserved, prefix hits are pinned
    2. checking   the hits are digested again
    3. running    chunk by chunk; after each one the blocks it filled are offered
    4. done       first tokens are out; offered blocks stay pinned until they are taken, or for a while
A job leaves by being taken, cancelled, failed, by the loss of its link, or when its pins expire; then it owns nothing.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.stubs.link_pb2 import Job as JobMessage
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
    arrival: float
    deadline: float
    phase: Phase = Phase.RUNNING
    next_offer: int = 0  # block index; everything before was offered or is not wanted
    digests: dict[int, bytes] = field(default_factory=dict)  # of blocks not offered yet
    pinned_until: float = 0.0

    @property
    def id(self) -> tuple[str, str]:
        return (self.link, self.message.attempt)

    @property
    def remaining(self) -> int:
        """Prompt positions still to be computed."""
        return 0 if self.phase is Phase.DONE else max(0, len(self.sequence.tokens) - self.sequence.computed)


def job_problem(job: JobMessage, *, vocab_size: int, max_context: int) -> str | None:
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
    s = job.sampling
    if job.sample_indices and not (0 <= s.temperature <= 100 and 0 < s.top_p <= 1 and s.top_k >= 0):
        return "sampling parameters are out of range"
    if job.sample_indices and not -1 <= s.logprobs <= vocab_size:
        return "logprobs is out of range"
    return None
