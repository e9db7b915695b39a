"""The pipeline of the front door. HTTP and gRPC are two skins of it.

1. `prepare`: an Ask becomes a bounded, tokenised Request, or InvalidRequest (bounds.py)        DESIGN §4.1
              its grammar is tried in a process of its own (grammar_judge.py)
2. `open`:    the dispatcher admits it; leaving the context cancels whatever still runs          §4.3
3. `Generation`: token events go through one fold per sample and come out as deltas (text.py)    §4.11
4. `Generation.usage` and `.trace`: read after the context was left                              §4.12
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from cluster.core.clock import Clock
from cluster.core.config import RouterSettings
from cluster.core.errors import BrokenOff, DeadlineExceeded, RequestFailed, Unavailable
from cluster.core.ids import new_request_id
from cluster.program import Membership
from cluster.scores import Scores
from cluster.usage import Who
from router.figures import Figures
from router.front import bounds
from router.front.ask import Ask, Prompt, TextPrompt, TokenPrompt
from router.front.auth import Gate
from router.front.fleet_metrics import FleetCollector
from router.front.messages import ChatPrompt
from router.front.metrics import Call, FrontMetrics
from router.front.model_text import ModelText
from router.front.prompt_scores import EchoedLogprobs, PromptLogprobs, PromptPart, ShownPrompt
from router.front.stops import NO_STOPS, StopStrings
from router.front.text import Delta, SampleText, TextRules
from router.front.tools.formats import fold_maker
from router.front.tracing import Tracing, carrier_of
from router.front.usage import Characters, Receipt, Usage
from router.front.usage_metrics import UsageCollector
from router.requests import Dispatcher, Request, Running, TokenEvent, Trace
from router.tenants import ANONYMOUS, Tenant

# Tokenising takes about 1 ms per 1,000 characters; longer texts must not hold up everybody's streams.
INLINE_CHARACTERS = 1024
T = TypeVar("T")
# How much later than the dispatcher the front door gives up by itself.
DEADLINE_GRACE_S = 1.0
_DRAINING = "this router is about to leave; another one takes the request"


class Taker(Protocol):
    """Takes deltas in the very pass that brings their tokens, while that needs no waiting."""

    def ready(self) -> bool:
        """Whether it can take one now."""

    def take(self, delta: Delta) -> None:
        """The next one; only while it is ready."""


class Generation:
    """An admitted request's answer: iterate for the deltas of each step, until every sample has finished.

    Before them come the parts of its prompt, where log-probabilities of these are wanted.
    Raises Unavailable, DeadlineExceeded or RequestFailed while iterating.
    """

    def __init__(self, running: Running, request: Request, rules: TextRules, call: Call, first: int = 0) -> None:
        """`first`: the index of its first sample, where several generations make one answer."""
        self._running = running
        self._events: AsyncIterator[TokenEvent | Scores] = running.events()
        self._samples = [SampleText(first + index, rules) for index in range(request.n)]
        self._first = first
        self._unfinished = request.n
        self._opened = request.prompt_logprobs is None
        self._call = call
        self.request = request
        self.tokenizer = rules.tokenizer

    @property
    def trace(self) -> Trace:
        return self._running.trace

    @property
    def usage(self) -> Usage:
        completion = sum(sample.completion_tokens for sample in self._samples)
        return Usage(len(self.request.prompt), completion, self.trace.cached_tokens)

    @property
    def finished(self) -> list[tuple[int, int]]:
        """(index, tokens) of the samples that have ended."""
        samples = enumerate(self._samples, self._first)
        return [(index, sample.completion_tokens) for index, sample in samples if sample.finish is not None]

    @property
    def dropped_tokens(self) -> int:
        return sum(sample.dropped_tokens for sample in self._samples)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta | PromptPart:
        """The next delta, perhaps without text (a first token that is half a character still opens the answer)."""
        if not self._opened:
            self._opened = True
            return PromptPart(self._first, 0, self.request.prompt[:1], None)
        while self._unfinished:
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                if not self._unfinished:  # the last delta was taken by another way
                    raise
                raise RequestFailed("the answer broke off before its end") from None
            if isinstance(event, Scores):
                return PromptPart(self._first, event.start, self.request.prompt[event.start : event.end], event)
            delta = self._feed(event)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    def offer(self, taker: Taker) -> None:
        """Deltas go to `taker` where it is ready and this is being waited for; the others, and the end, as ever."""

        def take(event: TokenEvent) -> bool:
            if not taker.ready():
                return False
            if (delta := self._feed(event)) is not None:
                taker.take(delta)
            return True

        self._running.offer(take)

    async def close(self) -> None:
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()

    def _feed(self, event: TokenEvent) -> Delta | None:
        """None when the event adds nothing: its sample has already ended."""
        if not 0 <= event.index < len(self._samples):
            raise RequestFailed(f"an answer came for sample {event.index}, which was not asked for")
        sample = self._samples[event.index]
        if sample.finish is not None:
            sample.feed(event.ids)  # which only counts them
            return None
        if event.ids:
            self._call.tokens(self._first + event.index)
        delta = sample.feed(event.ids, event.logprobs, event.end)
        if delta.finish is not None:
            self._unfinished -= 1
            if event.end is None:
                self._running.stop(event.index)
        return delta


class FrontDoor:
    """One per router. `text` and `model_name` are those of the one base model that is served. `gate`: who may ask."""

    def __init__(
        self,
        settings: RouterSettings,
        model_name: str,
        text: ModelText,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: FrontMetrics,
        gate: Gate | None = None,
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.text = text
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.gate = gate or Gate()
        self.tracing: Tracing | None = None
        self.draining = False
        self.members = Membership(clock)  # as the controller tells it
        self.created = int(clock.wall())
        metrics.registry.register(FleetCollector(self._figures, self.gate.permits))
        metrics.registry.register(UsageCollector(self.gate, model_name))

    def call(self, api: str, headers: Iterable[tuple[str | bytes, str | bytes]]) -> Call:
        """Enter it when a call arrives, with these headers or metadata."""
        call = self.metrics.call(api)
        if self.tracing is not None:
            call.span = self.tracing.start(api, carrier_of(headers))
        return call

    def _figures(self) -> Figures:
        """A router that is about to leave takes nothing, whatever workers would."""
        seen = self.dispatcher.figures()
        told_s, desired = self.members.age_s(), self.members.desired or {}
        return replace(seen, ready=seen.ready and not self.draining, told_s=told_s, desired=desired)

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be taken and placed now; empty when one could."""
        if self.draining:
            return [_DRAINING]
        if self.dispatcher.ready():
            return []
        try:
            self.dispatcher.limits()
        except Unavailable as error:
            return [str(error)]
        return ["no worker takes requests now"]

    def check_room(self, tenant: Tenant) -> None:
        """Raises Overloaded when a request of this tenant would be refused whatever it is, before anything is read."""
        self.gate.permits.check(tenant)
        self.dispatcher.check_room(tenant.name)

    async def prepare(
        self,
        ask: Ask,
        call: Call,
        *,
        public_id: str,
        tenant: Tenant = ANONYMOUS,
        deadline_s: float | None = None,
    ) -> Request:
        """A request that fits, or InvalidRequest; Unavailable while no workers are known, and once draining.

        `deadline_s`: what the client allows from now on; never more than the configured deadline from arrival.
        """
        began = call.elapsed()
        if call.span is not None:
            call.span.named(public_id)
        if self.draining:
            raise Unavailable(_DRAINING)
        bounds.check_model(ask.model, self.model_name)
        bounds.check_parameters(ask, self.settings)
        limits = self.dispatcher.limits()
        ids = await self.tokenise(ask.prompt, limits.max_context, ask.spelling.prompt)
        fit = bounds.fit(ask, ids, limits)
        bounds.check_scored([(ask, len(fit.prompt))], self.settings)
        if ask.grammar is not None:
            await self.text.grammars.check(ask.grammar, ask.spelling.grammar, tenant.name)
        left = self.settings.deadline_s - call.elapsed()
        if deadline_s is not None:
            left = min(left, deadline_s - (call.elapsed() - began))
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request could start")
        return Request(
            request_id=new_request_id(),
            public_id=public_id,
            prompt=fit.prompt,
            max_tokens=fit.max_tokens,
            n=ask.n or 1,
            sampling=bounds.sampling(ask, limits),
            stop=ask.stop,
            stop_token_ids=ask.stop_token_ids,
            ignore_eos=ask.ignore_eos,
            deadline_s=left,
            grammar=ask.grammar,
            salt=tenant.salt,
            tenant=tenant.name,
            priority=ask.priority or 0,
            prompt_logprobs=ask.scored,
        )

    @asynccontextmanager
    async def permitted(self, tenant: Tenant, requests: Sequence[Request], call: Call) -> AsyncIterator[None]:
        """Around what was asked in one call, within the tenant's limits. Raises RateLimited, Unavailable.

        When it is left, what this tenant used is known: `call` has the sums, and its receipt what was handed over.
        """
        ledger, who = self.gate.ledger, Who(tenant.name, self.model_name)
        async with self.gate.permits.hold(tenant, sum(len(request.prompt) for request in requests)) as permit:
            call.receipt = Receipt(partial(ledger.add, who))
            with ledger.follow(call.receipt):
                try:
                    yield
                finally:
                    permit.written = call.written
                    call.receipt.close()

    async def settled(self, call: Call) -> None:
        """Before the end of an answer, of which all else was handed over: what it used outlives this router."""
        await call.receipt.known()
        call.receipt.close()
        await self.gate.ledger.settled()

    @asynccontextmanager
    async def open(self, request: Request, call: Call, ask: Ask, first: int = 0) -> AsyncIterator[Generation]:
        """Admit `request`, which `ask` became. `first`: the index of its first sample.

        Raises Overloaded, Unavailable, DeadlineExceeded, RequestFailed.
        """
        rules = self._rules(request, ask)
        async with self.dispatcher.run(request) as running:
            if call.span is not None:
                call.span.admitted(request.request_id)
            call.follow(running.trace)
            generation = Generation(running, request, rules, call, first)
            tokens, characters = len(request.prompt), self._characters(ask.prompt)
            call.receipt.opened(first, request.n, tokens=tokens, characters=characters, trace=running.trace)
            try:
                yield generation
            finally:
                call.used(generation.usage, generation.dropped_tokens, generation.trace)
                call.ended(generation.finished)
                await generation.close()

    def _rules(self, request: Request, ask: Ask) -> TextRules:
        ends = set(request.stop_token_ids)
        if not request.ignore_eos:
            ends.update(self.dispatcher.limits().eos_ids)
        kind = None if self.text.chat is None else self.text.chat.tool_format
        return TextRules(
            self.text.tokenizer,
            frozenset(ends),
            request.max_tokens,
            StopStrings(request.stop, shown=ask.show_stop) if request.stop else NO_STOPS,
            fresh=ask.fresh,
            special=ask.show_special,
            calls=None if ask.tools is None or kind is None else fold_maker(ask.tools, kind),
            min_tokens=request.sampling.min_tokens,
        )

    def shown(self, ask: Ask) -> ShownPrompt:
        """What goes before the answer to a prompt, or beside it: nothing, where nothing of that was asked for."""
        text, tokenizer = self._echo(ask), self.text.tokenizer
        echoed = EchoedLogprobs(text, tokenizer, ask.logprobs) if ask.echo and ask.logprobs is not None else None
        listed = None if ask.prompt_logprobs is None else PromptLogprobs(tokenizer, ask.prompt_logprobs)
        return ShownPrompt(text, echoed, listed)

    def _echo(self, ask: Ask) -> str:
        """The prompt as it goes before the answer, where that was asked for."""
        match ask.prompt:
            case TextPrompt(text) if ask.echo:
                return text
            case TokenPrompt(ids) if ask.echo:
                return self.text.text_of(ids, special=ask.show_special)
        return ""

    def _characters(self, prompt: Prompt) -> Characters:
        """Of the text that was given; of ids, of the text that they stand for."""
        match prompt:
            case TextPrompt(text):
                return len(text)
            case ChatPrompt():
                return prompt.said
            case TokenPrompt(ids):
                return lambda: len(self.text.text_of(ids, special=False))

    async def tokenise(self, prompt: Prompt, most: int, param: str) -> list[int] | tuple[int, ...]:
        """A prompt's ids. Raises InvalidRequest, naming `param`, for one that is far longer than `most` tokens."""
        match prompt:
            case TokenPrompt(ids):
                return ids
            case TextPrompt(text, add_special):
                size, encode = len(text), partial(self.text.text_ids, text, most, param, add_special=add_special)
            case ChatPrompt():
                size, encode = prompt.characters, partial(self.text.chat_ids, prompt, most, param)
        return await beside(size, encode)


async def beside(size: int, work: Callable[[], T]) -> T:
    """Do it, in a thread where there is much of it, in characters or tokens: streams wait for the event loop."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


@contextmanager
def or_unavailable(begun: Callable[[], bool]) -> Iterator[None]:
    """Around the reading of an answer. Raises Unavailable where it breaks off and its client has nothing of it yet:
    it may ask again. `begun`: whether it has."""
    try:
        yield
    except BrokenOff as error:
        if begun():
            raise
        raise Unavailable(str(error)) from error


class UntilDeadline:
    """Around everything that serves `request`, writing included. Raises DeadlineExceeded.

    The dispatcher ends a request at its deadline; this ends the wait for a client that does not read its answer.
    """

    def __init__(self, request: Request) -> None:
        self._timeout = asyncio.timeout(request.deadline_s + DEADLINE_GRACE_S)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise DeadlineExceeded("the client did not take its answer before the deadline") from None
