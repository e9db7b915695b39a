"""Whose turn it is where one at a time is served: everybody in rotation, and each in the order it came."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """On one event loop. Who asks for much waits for itself: before anybody's next turn the others have one each."""

    def __init__(self) -> None:
        self._taken = False
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Entered when it is the turn of `who`; left, the next one's comes."""
        if self._taken:
            await self._wait(who)
        self._taken = True
        try:
            yield
        finally:
            self._give_on()

    async def _wait(self, who: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just come
                self._give_on()
            raise

    def _give_on(self) -> None:
        while self._lines:
            who = next(iter(self._lines))
            line = self._lines.pop(who)
            turn = line.popleft()
            if line:
                self._lines[who] = line  # behind the others
            if not turn.done():  # one that is has left
                turn.set_result(None)
                return
        self._taken = False
