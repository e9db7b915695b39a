"""A dispatcher that plays scripts: the front door's other side in its tests.

A script is a list of steps for one request: a TokenEvent and Scores are delivered, an exception is raised, an
asyncio.Event is waited for. The fake keeps books a real dispatcher would keep, so tests can see that everything was let
go.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.core.errors import Overloaded, Unavailable
from cluster.pipe import Wish
from cluster.scores import Scores
from cluster.stubs.watch_pb2 import Status
from router.figures import Figures, WorkerFigures
from router.overview import Overview
from router.records import RequestRecord
from router.requests import EndReason, Limits, Request, Running, TokenEvent, TokenLogprob, Trace

Step = TokenEvent | Scores | Exception | asyncio.Event
Script = Callable[[Request], Sequence[Step]]

DEFAULT_LIMITS = Limits(max_context=512, pool_tokens=1024, block_size=16, vocab_size=1024, eos_ids=(1023,))


def say(text: str, *, per_event: int = 1, end: bool = True) -> Script:
    """Every sample says `text` in the tracer tokenizer's bytes and ends with EOS."""

    def script(request: Request) -> list[Step]:
        ids = [*text.encode(), *([DEFAULT_LIMITS.eos_ids[0]] if end else [])][: request.max_tokens]
        steps: list[Step] = []
        if not ids:  # max_tokens 0: the prompt alone was asked about
            steps = [TokenEvent(index, (), (), "length") for index in range(request.n)]
        for start in range(0, len(ids), per_event):
            part = tuple(ids[start : start + per_event])
            last = start + per_event >= len(ids)
            reason: EndReason = "eos" if ids[-1] == DEFAULT_LIMITS.eos_ids[0] else "length"
            logprobs = tuple(TokenLogprob(-0.5, ((i, -0.5), (ord("z"), -1.5))) for i in part)
            wanted = logprobs if request.sampling.logprobs is not None else ()
            steps += [TokenEvent(index, part, wanted, reason if end and last else None) for index in range(request.n)]
        return steps

    return script


@dataclass(slots=True)
class FakeRunning:
    """One admitted request."""

    script: Sequence[Step]
    trace: Trace
    stopped: list[int] = field(default_factory=list)

    async def events(self) -> AsyncIterator[TokenEvent | Scores]:
        for step in self.script:
            match step:
                case TokenEvent() | Scores():
                    yield step
                case asyncio.Event():
                    await step.wait()
                case Exception():
                    raise step

    def offer(self, take: Callable[[TokenEvent], bool]) -> None:
        """Nobody has to take anything at once: all of it is among the events."""

    def stop(self, index: int) -> None:
        self.stopped.append(index)


class FakeDispatcher:
    """Plays `script` for every request. `refusal` is raised on admission; `available` False: no workers."""

    def __init__(self, script: Script, limits: Limits = DEFAULT_LIMITS) -> None:
        self.script = script
        self.available = True
        self.full = False
        self.refusal: Exception | None = None
        self.requests: list[Request] = []
        self.runs: list[FakeRunning] = []
        self.active: set[str] = set()
        self.known: list[RequestRecord] = []
        self.seen = Overview(0.0, (), (), (), (), (), 0, 0, 0)
        self.wishes: list[Wish] = []
        self.problem: str | None = None
        self.slowly = False
        self._watchers: list[tuple[int, asyncio.Event]] = []
        self._limits = limits

    def limits(self) -> Limits:
        if not self.available:
            raise Unavailable("no decode worker is known")
        return self._limits

    def ready(self) -> bool:
        return self.available

    def check_room(self, tenant: str) -> None:
        if self.full:
            raise Overloaded("1 requests are waiting", retry_after_s=7.0)

    @asynccontextmanager
    async def run(self, request: Request) -> AsyncIterator[Running]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        trace = Trace("p0", "d0", attempts=1, cached_tokens=16, kv_bytes=4096, transport="shm")
        running = FakeRunning(self.script(request), trace)
        self.runs.append(running)
        self.active.add(request.request_id)
        self._tell_watchers()
        try:
            yield running
        finally:
            trace.timings_ms["e2e"] = 1.0
            self.active.discard(request.request_id)
            self._tell_watchers()

    async def until_active(self, count: int) -> None:
        """Wait until exactly `count` requests are running."""
        reached = asyncio.Event()
        self._watchers.append((count, reached))
        self._tell_watchers()
        await reached.wait()

    def _tell_watchers(self) -> None:
        for count, reached in self._watchers:
            if len(self.active) == count:
                reached.set()

    def records(self, name: str) -> list[RequestRecord]:
        return [record for record in reversed(self.known) if name in (record.request_id, record.public_id)]

    def figures(self) -> Figures:
        status = Status(gauges={"blocks_in_use": 3}, cached_blocks=2)
        workers = (WorkerFigures("decode", "d0", "ready", 0, 7, 0.0, status),)
        return Figures(ready=self.available, gauges={"queued": len(self.active)}, workers=workers)

    def overview(self) -> Overview:
        return self.seen

    async def fulfil(self, wish: Wish) -> str | None:
        """What operators want. `slowly`: it is never done."""
        self.wishes.append(wish)
        if self.slowly:
            await asyncio.Event().wait()
        return self.problem

    def status(self) -> dict[str, object]:
        workers = {"d0": {"free_blocks": 7, "state": "ready"}}
        return {"running": len(self.active), "queue": 0, "version": "x", "workers": workers}
