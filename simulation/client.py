"""A simulated client: what it asked, what it got, and whether that is right (I1, I3, I4, I5)."""

from dataclasses import dataclass, field

from cluster.core.errors import HeadraceError
from cluster.scores import Scores
from engine.messages import DrawRules, Grammar, SampleSpec, TracerModel
from engine.model.tracer import reference_tokens
from router.requests import Request, TokenEvent, Trace
from simulation.scores import judge_scores
from simulation.site import Violation
from simulation.vocabulary import tracer_vocabulary_of

UNSET = "running"


@dataclass(slots=True)
class Wish:
    """What the client will do besides reading: all of it seeded, most of it nothing."""

    cancel_after_s: float | None = None
    stop_at: dict[int, int] = field(default_factory=dict)  # sample -> the front door ends it after so many tokens


@dataclass(slots=True, eq=False)
class Client:
    """One request of one client, judged token by token against the plain-Python reference."""

    request: Request
    wish: Wish
    model: TracerModel
    router: str
    arrived: float
    got: list[list[int]] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    next_scored: int = 1  # the prompt's next token whose log-probability is to come, if any are wanted
    outcome: str = UNSET
    progress_at: float = 0.0
    excused_s: float = 0.0  # time in which its router was frozen, once it is over; before, less what it was when asked
    trace: Trace = field(default_factory=Trace)
    _right: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.got = [[] for _ in range(self.request.n)]
        self.progress_at = self.arrived

    @property
    def over(self) -> bool:
        return self.outcome != UNSET

    @property
    def placed(self) -> bool:
        """Whether it has left the line at least once."""
        return "queue" in self.trace.timings_ms

    def story(self) -> list[str]:
        """What is worth counting about a right answer: what it was drawn under, and what it went through."""
        if self.outcome != "ok":
            return []
        how, attempts = self.request.sampling, self.trace.attempts
        kinds = {
            "a grammar": self.request.grammar is not None,
            "penalties": (how.presence_penalty, how.frequency_penalty, how.repetition_penalty) != (0, 0, 1),
            "bias": bool(how.logit_bias),
            "min_p": how.min_p > 0,
            "min_tokens": how.min_tokens > 0,
            "prompt_logprobs": self.request.prompt_logprobs is not None,
            "max_tokens 0": not self.request.max_tokens,
        }
        told = [f"answers under {kind}" for kind, asked in kinds.items() if asked]
        if attempts > 1:
            told += [f"failovers under {kind}" for kind, asked in kinds.items() if asked]
        return [*told, "several failovers"] if attempts > 2 else told

    def right(self, index: int) -> list[int]:
        """All tokens of a sample up to its own end, as the reference writes them."""
        if not self.request.max_tokens:
            return []
        if index not in self._right:
            request, s = self.request, self.request.sampling
            spec = SampleSpec(index, s.seed, s.temperature, s.top_p, s.top_k, -1, s.min_p)
            grammar, vocabulary = request.grammar, tracer_vocabulary_of(self.model.vocab_size)
            start = None if grammar is None else vocabulary.compile(grammar.kind, grammar.source).copy
            tokens = reference_tokens(
                list(request.prompt),
                request.max_tokens,
                self.model,
                spec,
                stop_at_eos=not request.ignore_eos,
                rules=rules_of(request),
                grammar=start,
            )
            stops = [at for at, token in enumerate(tokens) if token in request.stop_token_ids]
            self._right[index] = tokens[: stops[0] + 1] if stops else tokens
        return self._right[index]

    def hear(self, scores: Scores, now: float) -> None:
        """More of the prompt's log-probabilities. Raises Violation unless they are the next right ones, and in time."""
        name = self.request.request_id
        if self.over or any(self.got) or self.request.prompt_logprobs is None:
            raise Violation(f"I4: {name} hears of its prompt after a token or its end, or without having asked")
        self.next_scored = judge_scores(scores, self.request.prompt, self.model, self.next_scored, name)
        self.progress_at = now

    def take(self, event: TokenEvent, now: float) -> None:
        """New tokens. Raises Violation unless they are the next right ones."""
        name = f"{self.request.request_id}[{event.index}]"
        if self.over:
            raise Violation(f"I3: {name} gets tokens after its outcome {self.outcome}")
        if event.index in self.ends:
            raise Violation(f"I4: {name} gets tokens after its end {self.ends[event.index]}")
        got, right = self.got[event.index], self.right(event.index)
        expected = right[len(got) : len(got) + len(event.ids)]
        if list(event.ids) != expected:
            raise Violation(f"I1/I5: {name} gets {list(event.ids)} at offset {len(got)}, right is {expected}")
        got += event.ids
        self.progress_at = now
        if event.end is not None:
            self._end(event.index, event.end, name)

    def finish(self, error: HeadraceError | None, now: float) -> None:
        """The terminal outcome. Raises Violation when there was one, or when a success lacks tokens."""
        if self.over:
            raise Violation(f"I3: {self.request.request_id} ends twice: {self.outcome}, then {error}")
        unscored = self.request.prompt_logprobs is not None and self.next_scored < len(self.request.prompt)
        if error is None and unscored:
            raise Violation(f"I4: success, but {self.request.request_id} heard of its prompt up to {self.next_scored}")
        self.outcome = "ok" if error is None else type(error).__name__
        self.progress_at = now
        for index, got in enumerate(self.got):
            whole = len(got) == len(self.right(index)) if index not in self.stopped else True
            if error is None and not (whole and (index in self.ends or index in self.stopped)):
                raise Violation(f"I4: success, but sample {index} of {self.request.request_id} has {len(got)} tokens")

    def _end(self, index: int, reason: str, name: str) -> None:
        self.ends[index] = reason
        right, request = self.right(index), self.request
        if len(self.got[index]) != len(right):
            raise Violation(f"I4: {name} ends by {reason} after {len(self.got[index])} of {len(right)} tokens")
        last = right[-1] if right else -1  # nothing was to be written
        eos = last == self.model.vocab_size - 1 and not request.ignore_eos
        expected = "eos" if eos else "stop" if last in request.stop_token_ids else "length"
        if reason != expected:
            raise Violation(f"I5: {name} ends by {reason}, right is {expected}")


def rules_of(request: Request) -> DrawRules | None:
    """What was asked, in the engine's terms; by another way than the one over the wire (engine/asked.py)."""
    how, grammar = request.sampling, request.grammar
    rules = DrawRules(
        len(request.prompt),
        how.presence_penalty,
        how.frequency_penalty,
        how.repetition_penalty,
        dict(how.logit_bias),
        how.min_tokens,
        request.stop_token_ids if how.min_tokens else (),
        None if grammar is None else Grammar(grammar.kind, grammar.source),
    )
    return None if rules == DrawRules(len(request.prompt)) else rules
