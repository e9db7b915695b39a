"""The dispatcher's shell: carries out the core's effects with asyncio and gRPC (router.requests.Dispatcher).

    runtime = RouterRuntime(core, SystemClock(), epoch=epoch, credentials=credentials)
    serving = asyncio.create_task(runtime.serve())
    runtime.set_members(["127.0.0.1:4001", "127.0.0.1:4002"])
    async with runtime.run(request) as running:
        async for event in running.events(): ...

Everything runs on one event loop. Every input goes core first, effects second, in one piece: nothing in between awaits.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from cluster.core.clock import Clock
from cluster.core.errors import BrokenOff, HeadraceError, IntegrityError, RequestFailed
from cluster.credentials import Credentials
from cluster.scores import Scores
from cluster.stubs.session_pb2 import FromDecode
from cluster.stubs.watch_pb2 import WatchEvent
from router.dispatcher import DispatcherCore
from router.effects import (
    CloseSession,
    CloseWatch,
    Deliver,
    DeliverScores,
    Effect,
    Finished,
    OpenSession,
    OpenWatch,
    ReopenSession,
    ReopenWatch,
    SendSession,
    StreamClosed,
    StreamOpened,
)
from router.figures import Figures
from router.links import OnFailure, StreamKeeper
from router.overview import Overview
from router.records import RequestRecord
from router.requests import Limits, Request, Running, TokenEvent, Trace, joined
from router.session_client import SessionClient
from router.watch_client import WatchClient

TICK_S = 0.1
MAX_HELD_IDS = 65_536  # undelivered token ids of one client


class RunningRequest:
    """A request as its client sees it: admitted when it is entered, cancelled, if it still runs, when it is left.

    Who waits for the next event may have it taken in the pass that brings it (`offer`). All others wait here, so that
    no stream ever waits for a client. What waits for a client that lags is one event for each sample, however many
    tokens it brings. (No generators: asyncio keeps a list of all that run, at a price.)
    """

    def __init__(self, runtime: "RouterRuntime", request: Request) -> None:
        self.trace = Trace()
        self._runtime = runtime
        self._request = request
        self._scores: deque[Scores] = deque()
        self._waiting: dict[int, list[TokenEvent]] = {}
        self._held = 0
        self._ended = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None  # somebody waits for it, once it is done no longer
        self._take: Callable[[TokenEvent], bool] | None = None

    async def __aenter__(self) -> Self:
        self._runtime.admit(self, self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._take = None  # it may hold what holds this
        self._runtime.leave(self._request.request_id)

    def events(self) -> AsyncIterator[TokenEvent | Scores]:
        """See router.requests.Running."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent | Scores:
        while True:
            if self._scores:  # all of them come before the first token
                return self._scores.popleft()
            if self._waiting:
                event = joined(self._waiting.pop(next(iter(self._waiting))))
                self._held -= len(event.ids)
                return event
            if self._ended:
                # Not kept here, nor in this frame: with its traceback it would be a cycle, prompt and all.
                error, self._error = self._error, None
                try:
                    raise error or StopAsyncIteration
                finally:
                    del error
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def offer(self, take: Callable[[TokenEvent], bool]) -> None:
        """See router.requests.Running."""
        self._take = take

    def stop(self, index: int) -> None:
        """See router.requests.Running. Raises IndexError when there is no such sample."""
        if not 0 <= index < self._request.n:
            raise IndexError(f"sample {index} of {self._request.n}")
        self._runtime.stop(self._request.request_id, index)

    def push(self, event: TokenEvent) -> bool:
        """Hand an event to the client, or keep it. Returns False when it holds too many already."""
        take, news = self._take, self._news
        if take is not None and event.end is None and news is not None and not news.done():
            # Somebody waits for news and has been told of none, so nothing waits here.
            try:
                if take(event):
                    return True
            except Exception as error:  # this request's alone, and raised where its events are read (I8)
                self.finish(error)
                return True
        self._waiting.setdefault(event.index, []).append(event)
        self._held += len(event.ids)
        self._tell()
        return self._held <= MAX_HELD_IDS

    def hear(self, scores: Scores) -> None:
        """Log-probabilities of the prompt's tokens; how many there are is bounded by bounds.py."""
        self._scores.append(scores)
        self._tell()

    def finish(self, error: Exception | None) -> None:
        """The terminal outcome: the first one counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class _OwnErrors:
    """Around the core: what it refuses is for the caller; anything else means doubtful books: this life ends."""

    def __init__(self, failed: OnFailure) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ours = isinstance(error, IntegrityError) or not isinstance(error, HeadraceError)
        if isinstance(error, Exception) and ours:
            self._failed(error)


class RouterRuntime:
    """Implements router.requests.Dispatcher and router.records.Recorder.

    `serve` must run.
    """

    def __init__(
        self,
        core: DispatcherCore,
        clock: Clock,
        *,
        epoch: int,
        credentials: Credentials,
        rng: random.Random | None = None,
    ) -> None:
        self._core = core
        self._clock = clock
        self._epoch = epoch
        self._credentials = credentials
        self._rng = rng or random.Random()
        self._running: dict[str, RunningRequest] = {}
        self._watches: dict[str, WatchClient] = {}
        self._sessions: dict[str, SessionClient] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._effects: deque[Effect] = deque()
        self._applying = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._own_errors = _OwnErrors(self._on_failure)

    async def serve(self) -> None:
        """Let time act until cancelled, then end what runs and close all streams. Raises errors of our own code."""
        try:
            while self._failure is None:
                self._apply(self._core.tick(self._clock.now()))
                try:
                    await asyncio.wait_for(self._failed.wait(), TICK_S)
                except TimeoutError:
                    continue
            raise self._failure
        finally:
            await self._close()

    def set_members(self, addresses: Iterable[str]) -> None:
        """The workers there should be, as host:port."""
        self._apply(self._core.set_members(addresses, self._clock.now()))

    def limits(self) -> Limits:
        """See router.requests.Dispatcher."""
        return self._core.limits(self._clock.now())

    def ready(self) -> bool:
        """See router.requests.Dispatcher."""
        return self._core.ready(self._clock.now())

    def status(self) -> dict[str, object]:
        """See router.requests.Dispatcher."""
        return self._core.status(self._clock.now())

    def figures(self) -> Figures:
        """See router.requests.Dispatcher."""
        return self._core.figures(self._clock.now())

    def overview(self) -> Overview:
        """See router.overview.Overseer."""
        return self._core.overview(self._clock.now())

    def records(self, name: str) -> list[RequestRecord]:
        """See router.records.Recorder."""
        return self._core.records(name)

    def check_integrity(self) -> None:
        """Raises IntegrityError when the books disagree."""
        self._core.check_integrity()

    def check_room(self, tenant: str) -> None:
        """See router.requests.Dispatcher."""
        self._core.check_room(tenant, self._clock.now())

    def run(self, request: Request) -> AbstractAsyncContextManager[Running]:
        """See router.requests.Dispatcher."""
        return RunningRequest(self, request)

    def admit(self, running: RunningRequest, request: Request) -> None:
        """Take a place in the queue, and go on to a worker if that is possible now. Raises Overloaded."""
        with self._own_errors:
            effects = self._core.add_request(request, self._clock.now(), running.trace)
        self._running[request.request_id] = running
        try:
            with self._own_errors:
                self._apply(effects)
        except BaseException:
            self.leave(request.request_id)
            raise

    def leave(self, request_id: str) -> None:
        """The client wants no more of it."""
        del self._running[request_id]
        with self._own_errors:
            self._apply(self._core.cancel(request_id, self._clock.now()))

    def stop(self, request_id: str, index: int) -> None:
        """No more tokens of this sample are wanted."""
        with self._own_errors:
            self._apply(self._core.stop(request_id, index, self._clock.now()))

    # ---- events from the streams

    def _on_watch(self, address: str, event: WatchEvent | StreamClosed) -> None:
        self._apply(self._core.on_watch(address, event, self._clock.now()))

    def _on_session(self, address: str, event: FromDecode | StreamOpened | StreamClosed) -> None:
        self._apply(self._core.on_session(address, event, self._clock.now()))

    def _on_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._failed.set()

    # ---- effects

    def _apply(self, effects: list[Effect]) -> None:
        """In the order they were decided: what is asked for while one is carried out comes after those before it."""
        self._effects.extend(effects)
        if self._applying:
            return
        self._applying = True
        try:
            while self._effects:
                self._effects.extend(self._carry_out(self._effects.popleft()))
        finally:
            self._applying = False
            self._effects.clear()  # an error of our own is in the way: this life ends

    def _carry_out(self, effect: Effect) -> list[Effect]:
        match effect:
            case Deliver(request_id, event):  # first: there are far more of these than of all others
                running = self._running.get(request_id)
                if running is not None and not running.push(event):
                    error = RequestFailed(f"the client left more than {MAX_HELD_IDS} tokens unread")
                    return self._core.abort(request_id, error, self._clock.now())
            case SendSession(address, message):
                self._sessions[address].send(message)
            case DeliverScores(request_id, scores):
                if (asking := self._running.get(request_id)) is not None:
                    asking.hear(scores)
            case Finished(request_id, failure):
                if (ended := self._running.get(request_id)) is not None:
                    ended.finish(failure)
            case OpenWatch(address):
                self._watches[address] = self._new_watch(address)
                self._watches[address].open()
            case OpenSession(address):
                self._sessions[address] = self._new_session(address)
                self._sessions[address].open()
            case ReopenWatch(address):
                self._watches[address].reopen()
            case ReopenSession(address):
                self._sessions[address].reopen()
            case CloseWatch(address):
                self._let_close(self._watches.pop(address))
            case CloseSession(address):
                self._let_close(self._sessions.pop(address))
        return []

    def _new_watch(self, address: str) -> WatchClient:
        return WatchClient(
            address,
            self._credentials,
            self._clock,
            self._rng,
            self._on_failure,
            epoch=self._epoch,
            on_event=self._on_watch,
        )

    def _new_session(self, address: str) -> SessionClient:
        return SessionClient(
            address, self._credentials, self._clock, self._rng, self._on_failure, on_event=self._on_session
        )

    def _let_close(self, keeper: StreamKeeper) -> None:
        task = asyncio.create_task(keeper.close(), name=f"close {keeper.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self) -> None:
        error = BrokenOff("the router is shutting down")
        for running in self._running.values():
            running.finish(error)  # even if the core cannot be asked any more
        for request_id in list(self._running):
            self._apply(self._core.abort(request_id, error, self._clock.now()))
        keepers = [*self._sessions.values(), *self._watches.values()]
        await asyncio.gather(*(keeper.close() for keeper in keepers), *self._closing)
