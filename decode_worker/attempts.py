"""Attempts: what this worker knows of one try to serve a request.

    1. waiting      no room yet; in the wait line
    2. checking     prefix hits are digested again before they are used; the engine makes the grammar ready
    3. handing_off  a prefill worker computes; blocks come over
    4. prefilling   this worker computes the rest of the prompt itself
    5. decoding     every position is there; tokens are written
An attempt leaves by ending, failing, being pre-empted or being cancelled; then it owns nothing.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.stubs.common_pb2 import TokenLogprob
from cluster.stubs.session_pb2 import FromDecode, Submit, TokenRun
from engine.asked import rules_of, scoring_of, spec_of
from engine.messages import DrawRules, SampleSpec
from engine.scoring import Scoring
from engine.sequence import Sequence


class Phase(Enum):
    WAITING = auto()
    CHECKING = auto()
    HANDING_OFF = auto()
    PREFILLING = auto()
    DECODING = auto()


@dataclass(slots=True)
class Sample:
    """One of the n token streams. `emitted` starts with the history of earlier attempts, which is never drawn again."""

    index: int
    emitted: list[int]
    finished: bool
    history: int  # how many of `emitted` an earlier attempt wrote
    sequence: Sequence | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of all that this attempt wrote, or none
    end: str = ""  # why it ended by itself: "eos", "stop", "length"

    def run(self, attempt: str, offset: int) -> TokenRun:
        """What it wrote from `offset` (not before `history`) on."""
        logprobs = self.logprobs[offset - self.history :] if self.logprobs else []
        return TokenRun(
            attempt=attempt, index=self.index, offset=offset, ids=self.emitted[offset:], logprobs=logprobs, end=self.end
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt and everything it owns."""

    id: str
    router: int  # its epoch
    submit: Submit
    samples: list[Sample]
    prompt_ids: list[int]  # what is prefilled: the prompt and, for a single sample, its history
    arrival: float
    deadline: float
    scoring: Scoring | None = None  # what is wanted of the prompt's own tokens
    phase: Phase = Phase.WAITING
    prompt: Sequence | None = None
    prefix_blocks: int = 0
    suspects: list[str] = field(default_factory=list)  # prefill workers that could not run it; perhaps nobody can
    awaited: int = 0  # answers of the engine, before it may go on from `checking`
    said: list[FromDecode] = field(default_factory=list)  # what its router may have missed, besides tokens
    closing: FromDecode | None = None
    kept_until: float | None = None  # after its end

    @property
    def live(self) -> list[Sample]:
        return [s for s in self.samples if not s.finished]

    @property
    def undrawn(self) -> list[Sample]:
        """Samples whose next token is drawn from the prompt's own last position."""
        if self.reads_only:
            return []
        return [s for s in self.live if len(self.submit.prompt) + len(s.emitted) == len(self.prompt_ids)]

    @property
    def reads_only(self) -> bool:
        """Nothing is written: it ends when the prompt is read."""
        return self.submit.max_tokens == 0

    @property
    def scored(self) -> bool:
        """Nothing is wanted of the prompt's own tokens, or not any more."""
        return self.scoring is None or self.scoring.done

    @property
    def owed(self) -> bool:
        """Whether reading the end of the prompt gives something besides KV: first tokens, log-probabilities."""
        return bool(self.undrawn) or not self.scored

    @property
    def protected(self) -> bool:
        """Pre-empted twice already: it holds its worst case and is never a victim again."""
        return self.submit.preemptions >= 2

    def sequences(self) -> list[Sequence]:
        """Every sequence of the attempt, once."""
        found = [s.sequence for s in self.samples if s.sequence is not None]
        if self.prompt is not None and self.prompt not in found:
            found.append(self.prompt)
        return found


def make_attempt(router: int, submit: Submit, now: float) -> Attempt:
    """Unpack a Submit that was checked before."""
    samples = [Sample(i, list(s.emitted), s.finished, len(s.emitted)) for i, s in enumerate(submit.samples)]
    prompt = list(submit.prompt)
    if len(samples) == 1:
        prompt += samples[0].emitted
    return Attempt(
        id=submit.attempt,
        router=router,
        submit=submit,
        samples=samples,
        prompt_ids=prompt,
        arrival=now - submit.waited_s,
        deadline=now + submit.deadline_s,
        scoring=scoring_of(submit.score, len(submit.prompt)) if submit.HasField("score") else None,
    )


def spec(submit: Submit, index: int) -> SampleSpec:
    """How sample `index` draws."""
    return spec_of(submit.sampling, index)


def rules(submit: Submit) -> DrawRules | None:
    """What earlier tokens have to say about the draws of this attempt."""
    return rules_of(submit.sampling, len(submit.prompt), submit.stop_token_ids)
