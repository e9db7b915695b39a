"""Several prompts in one request: one bounded fan-out whose streams are read as one answer (FAULTS C16).

Sample s of prompt p is choice p x n + s. At most `router.prompts_at_once` run at once, each a request of its own
for the dispatcher; the rest wait here and not in its queue. The first failure ends all; so does leaving the context.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.core.errors import DeadlineExceeded, InvalidRequest
from router.front.ask import Ask
from router.front.bounds import check_scored
from router.front.door import FrontDoor, Generation, Taker
from router.front.metrics import Call
from router.front.prompt_scores import PromptPart
from router.front.text import Delta
from router.front.usage import Usage
from router.requests import Request, Trace
from router.tenants import Tenant


class Answer(Protocol):
    """What a request comes to: deltas until every sample has finished; then usage and trace.

    Where log-probabilities of a prompt are asked for, its parts come before the first delta that answers it.
    """

    @property
    def usage(self) -> Usage: ...

    @property
    def trace(self) -> Trace: ...

    def __aiter__(self) -> AsyncIterator[Delta | PromptPart]: ...

    def offer(self, taker: Taker) -> None:
        """While the next delta is waited for, `taker` may get it at once, and then it is none of those iterated."""


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt: what was asked, and the request it became."""

    ask: Ask
    request: Request


async def prepare_all(front: FrontDoor, asks: Sequence[Ask], call: Call, public_id: str, tenant: Tenant) -> list[Part]:
    """Every prompt as a request that fits, before any worker hears of one. Raises what `FrontDoor.prepare` raises."""
    most, choices = front.settings.max_choices, sum(ask.n or 1 for ask in asks)
    if len(asks) > 1 and choices > most:
        message = f"{len(asks)} prompts with n answers each are {choices} choices, and at most {most} are allowed"
        raise InvalidRequest(message, param="prompt")
    parts: list[Part] = []
    for ask in asks:
        if parts:
            await asyncio.sleep(0)  # short texts are tokenised on the loop: others have their turn between two of them
        parts.append(Part(ask, await front.prepare(ask, call, public_id=public_id, tenant=tenant)))
    if len(parts) > 1:  # each by itself is within bounds
        check_scored(((part.ask, len(part.request.prompt)) for part in parts), front.settings)
    return parts


@dataclass(frozen=True, slots=True)
class _Running:
    """A part that was admitted; closing its stack cancels what still runs of it."""

    generation: Generation
    stack: AsyncExitStack


class _Batch:
    """Implements Answer over all parts. `stack` owns every part that was admitted."""

    def __init__(self, front: FrontDoor, parts: Sequence[Part], call: Call, stack: AsyncExitStack) -> None:
        self._front = front
        self._parts = parts
        self._call = call
        self._stack = stack
        self._prepared_at = call.elapsed()
        self._waiting = deque(range(len(parts)))
        self._generations: list[Generation] = []
        self._steps: dict[asyncio.Future[Delta | PromptPart | None], _Running] = {}
        self._deltas = self._read()

    @property
    def usage(self) -> Usage:
        used = [generation.usage for generation in self._generations]
        return Usage(sum(u.prompt for u in used), sum(u.completion for u in used), sum(u.cached for u in used))

    @property
    def trace(self) -> Trace:
        return _joined([generation.trace for generation in self._generations])

    def __aiter__(self) -> AsyncIterator[Delta | PromptPart]:
        return self._deltas

    def offer(self, taker: Taker) -> None:
        """Nothing: what one part brings could overtake what is just being written of it."""

    async def stop(self) -> None:
        """Read no more."""
        await self._deltas.aclose()
        for step in self._steps:
            step.cancel()
        await asyncio.gather(*self._steps, return_exceptions=True)

    async def _read(self) -> AsyncGenerator[Delta | PromptPart, None]:
        while self._waiting or self._steps:
            while self._waiting and len(self._steps) < self._front.settings.prompts_at_once:
                await self._start(self._waiting.popleft())
            done, _ = await asyncio.wait(self._steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                delta = step.result()
                running = self._steps.pop(step)
                if delta is None:
                    await running.stack.aclose()
                else:
                    self._next(running)
                    yield delta

    async def _start(self, at: int) -> None:
        part = self._parts[at]
        left = part.request.deadline_s - (self._call.elapsed() - self._prepared_at)
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the last prompts could start")
        request = part.request._replace(deadline_s=left)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        generation = await stack.enter_async_context(
            self._front.open(request, self._call, part.ask, first=at * request.n)
        )
        self._generations.append(generation)
        self._next(_Running(generation, stack))

    def _next(self, running: _Running) -> None:
        self._steps[asyncio.ensure_future(anext(running.generation, None))] = running


def open_all(front: FrontDoor, parts: Sequence[Part], call: Call) -> AbstractAsyncContextManager[Answer]:
    """Admit every part. Raises Overloaded, Unavailable, DeadlineExceeded, RequestFailed, here or while reading."""
    return front.open(parts[0].request, call, parts[0].ask) if len(parts) == 1 else _open_batch(front, parts, call)


@asynccontextmanager
async def _open_batch(front: FrontDoor, parts: Sequence[Part], call: Call) -> AsyncIterator[Answer]:
    async with AsyncExitStack() as stack:
        batch = _Batch(front, parts, call, stack)
        try:
            yield batch
        finally:
            await batch.stop()


def _joined(traces: Sequence[Trace]) -> Trace:
    """Counts add up, of times the longest counts, names are listed."""
    times: dict[str, float] = {}
    for trace in traces:
        for name, value in trace.timings_ms.items():
            times[name] = max(value, times.get(name, 0.0))
    return Trace(
        prefill_worker=_names(trace.prefill_worker for trace in traces),
        decode_worker=_names(trace.decode_worker for trace in traces),
        attempts=sum(trace.attempts for trace in traces),
        cached_tokens=sum(trace.cached_tokens for trace in traces),
        kv_bytes=sum(trace.kv_bytes for trace in traces),
        transport=_names(trace.transport for trace in traces),
        timings_ms=times,
    )


def _names(names: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(name for name in names if name))
