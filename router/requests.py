"""The border inside the router: what the front door hands to the dispatcher, and what comes back.

The front door (HTTP, gRPC) parses, tokenises and turns token ids into text. The dispatcher admits, places, follows one
request over all its attempts and yields token ids. Neither knows the other's insides.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from cluster.scores import Scores
from router.figures import Figures

EndReason = Literal["eos", "stop", "length"]
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `logprobs` None is none.

    Penalties and `min_p` are off at 0, `repetition_penalty` at 1; engine/rules.py and engine/sampler.py define them.
    Before `min_tokens` tokens a sample does not end by a token, nor by a stop string completed in them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `source`: a JSON schema as JSON text, a regular expression, or a Lark grammar."""

    kind: GrammarKind
    source: str = ""


class Request(NamedTuple):
    """One valid, bounded, immutable request. `request_id` is ours; `public_id` is only echoed to the client.

    `tenant` is "" where nobody needs a key; `salt` is the tenant's. A lower `priority` goes first among its requests.
    `prompt_logprobs` None: none; k: of every token of the prompt, beside the k most likely ones. `max_tokens` 0: the
    prompt is read and nothing is written.
    """

    request_id: str
    public_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    deadline_s: float = 600.0
    salt: bytes = b""
    grammar: Grammar | None = None
    tenant: str = ""
    priority: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one drawn token, and the most likely tokens as (id, logprob) when asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # not frozen, which is most of the cost of making one, and there is one for every token
class TokenEvent:
    """New tokens of sample `index`, in order, each delivered exactly once. `end` is set with the last ones.

    `logprobs` is empty or as long as `ids`. An `end` may come with no ids.
    """

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    end: EndReason | None = None


def joined(events: Sequence[TokenEvent]) -> TokenEvent:
    """What came for one sample, in order, as one event."""
    if len(events) == 1:
        return events[0]
    ids = tuple(token for event in events for token in event.ids)
    logprobs = tuple(entry for event in events for entry in event.logprobs)
    return TokenEvent(events[0].index, ids, logprobs, events[-1].end)


@dataclass(slots=True)
class Trace:
    """What happened to one request: filled while it runs, read by the front door when it ends. Milliseconds.

    `arrived` and `left` are the front door's own marks, on the router's monotonic clock in seconds: the request came;
    its answer, or its error, had been written.
    """

    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    cached_tokens: int = 0
    kv_bytes: int = 0
    transport: str = ""
    timings_ms: dict[str, float] = field(default_factory=dict)
    offers: tuple[tuple[int, float], ...] = ()  # (position, milliseconds since the job was sent) of the first hand-off
    arrived: float | None = None
    left: float | None = None


class Running(Protocol):
    """An admitted request. Leaving the context that gave it cancels whatever still runs."""

    trace: Trace

    def events(self) -> AsyncIterator[TokenEvent | Scores]:
        """Token events until every sample has ended; what came for a sample meanwhile is one event.

        With `prompt_logprobs` first those of the prompt, from position 1 to its end, each exactly once.
        Raises the HeadraceError that ended the request instead.
        """

    def offer(self, take: Callable[[TokenEvent], bool]) -> None:
        """While somebody waits for the next event, it is offered to `take` first, at once, without a task to wake.

        What is taken (True) is not among `events`; the last event of a sample, as its worker tells it, is not offered.
        An exception of `take` is raised by `events`.
        """

    def stop(self, index: int) -> None:
        """The front door found the end of this sample (a stop string): no more tokens of it are wanted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits, over both pools. `pool_tokens` bounds what `worst_blocks` gives on a decode worker."""

    max_context: int
    pool_tokens: int
    block_size: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def worst_blocks(prompt_tokens: int, samples: int, max_tokens: int, block_size: int) -> int:
    """Blocks of a request that writes all it may: samples share the prompt's full blocks, and each has its own rest.

    A decode worker reckons the same way (decode_worker/admission.py): what fits here is never refused there for good.
    """
    shared = prompt_tokens // block_size
    return shared + samples * (-(-(prompt_tokens + max_tokens) // block_size) - shared)


class Dispatcher(Protocol):
    """Takes valid requests to workers."""

    def limits(self) -> Limits:
        """The limits now. Raises Unavailable while no pair of workers is known."""

    def ready(self) -> bool:
        """Whether a request could be placed now."""

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded when no more requests of this tenant are taken now, before one is read and tokenised."""

    def run(self, request: Request) -> AbstractAsyncContextManager[Running]:
        """Admit a request. Entering waits for nothing but a place in the queue; raises Overloaded when it is full."""

    def status(self) -> dict[str, object]:
        """Workers, queue and gauges, for `headrace status` and /ready (JSON-able)."""

    def figures(self) -> Figures:
        """The same in types, and all that workers tell, for /metrics."""
