"""A sign of life in an event stream that has nothing to say (docs/failures.md): a proxy cuts a line that is silent.

    async with KeepAlive(comment, every_s) as alive:
        ...
        if alive.saying is not None:
            await alive.saying      before something is written: what is just being said goes first
        alive.wrote()               after it

One timer for each stream, however many tokens it has: it looks how long ago the last one was, and sleeps for the rest.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self


class KeepAlive:
    """`say` is called when nothing was written for `every_s`, and again each time that passes; 0: never.

    What it raises comes out of `saying`, which stays. Leaving cancels it.
    """

    def __init__(self, say: Callable[[], Coroutine[object, object, None]], every_s: float) -> None:
        self._say = say
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._wrote = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.saying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._every_s:
            self._sleep(self._every_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.saying is not None:
            self.saying.cancel()
            await asyncio.gather(self.saying, return_exceptions=True)
        if self._timer is not None:  # last: what was being said may have set it
            self._timer.cancel()

    def wrote(self) -> None:
        """The stream is not silent."""
        self._wrote = self._loop.time()

    def _sleep(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._wrote + self._every_s - self._loop.time()
        if left > 0:
            self._sleep(left)
        else:
            self.saying = self._loop.create_task(self._speak(), name="keep-alive")

    async def _speak(self) -> None:
        await self._say()
        self.wrote()
        self.saying = None
        self._sleep(self._every_s)
