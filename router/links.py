"""What keeps one stream to one worker up: connect, serve until it ends, say so, wait with backoff and jitter, again.

The backoff doubles with every connection that did not last, and starts over after one that did. So a watch that loses
event after event asks for its snapshot every few seconds, and watches that were lost together do not ask together.
`reopen` drops a stream without a word; an event that still comes from a dropped stream is not reported.
"""

import abc
import asyncio
import logging
import random
from collections.abc import Callable, Coroutine

import grpc
import grpc.aio

from cluster.core.clock import Clock
from cluster.credentials import Credentials, Proof
from cluster.rpc import check_answer
from router.effects import StreamClosed

CONNECT_S = 3.0
_FIRST_DELAY_S = 0.1
_HEALTHY_S = 5.0
_log = logging.getLogger(__name__)

OnFailure = Callable[[BaseException], None]


async def connect(connection: grpc.aio.Channel) -> None:
    """Return when it is up. Raises ConnectionError as soon as nobody takes it, TimeoutError after CONNECT_S.

    Not `channel_ready`: that goes on trying in silence, and a refusal is news (the worker is gone).
    """
    async with asyncio.timeout(CONNECT_S):
        while (state := connection.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise ConnectionError("nobody takes the connection")
            await connection.wait_for_state_change(state)


async def answered(call: grpc.aio.Call, proof: Proof) -> None:
    """Return when a member of the cluster took the call. Raises ConnectionError, TimeoutError after CONNECT_S."""
    async with asyncio.timeout(CONNECT_S):
        await check_answer(call, proof)


class StreamKeeper(abc.ABC):
    """One stream, kept up in a task of its own until `close`. `failed` gets errors of our own code, never a peer's."""

    longest_delay_s = 3.0

    def __init__(
        self, address: str, credentials: Credentials, clock: Clock, rng: random.Random, failed: OnFailure
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._clock = clock
        self._rng = rng
        self._failed = failed
        self._delay_s = 0.0
        self._began: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._dropped: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Start connecting, after the present backoff."""
        self._task = asyncio.create_task(self._keep(), name=f"{type(self).__name__} {self.address}")
        self._task.add_done_callback(self._on_done)

    def reopen(self) -> None:
        """Drop the present stream and connect again."""
        self._drop()
        self._back_off()
        self.open()

    async def close(self) -> None:
        """End the stream for good, and wait until its tasks have ended."""
        self._drop()
        while self._dropped:
            await asyncio.wait(self._dropped)

    @abc.abstractmethod
    def serve(self) -> Coroutine[None, None, str]:
        """Connect and report events until the stream ends; says why it did.

        May raise AioRpcError, TimeoutError or ConnectionError.
        """

    @abc.abstractmethod
    def report_closed(self, event: StreamClosed) -> None:
        """Tell the core."""

    @property
    def current(self) -> bool:
        """Whether the running task still serves the stream, and was not dropped."""
        return asyncio.current_task() is self._task

    def _drop(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            self._dropped.add(task)
            task.cancel()

    async def _keep(self) -> None:
        while self.current:
            await asyncio.sleep(self._delay_s * self._rng.uniform(0.5, 1.0))
            self._began = self._clock.now()
            try:
                reason = await self.serve()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                reason = f"no connection within {CONNECT_S:g} s"
            except ConnectionError as error:
                reason = str(error)
            if not self.current:
                return
            self._back_off()
            _log.info("stream to %s ended: %s", self.address, reason)
            self.report_closed(StreamClosed(reason))

    def _back_off(self) -> None:
        began, self._began = self._began, None
        if began is not None and self._clock.now() - began >= _HEALTHY_S:
            self._delay_s = 0.0
        self._delay_s = min(self.longest_delay_s, max(_FIRST_DELAY_S, self._delay_s * 2))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._dropped.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
