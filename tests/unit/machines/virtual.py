"""An event loop whose time jumps: what waits for a minute is there at once, and nothing ever really waits."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for a time-out it lets the time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Drive it with `run` and `let_pass`."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Until `work` is done, however long it waits."""
        return self.run_until_complete(work)

    def let_pass(self, seconds: float) -> None:
        """Everything that happens within so many seconds happens."""
        over = self.create_future()
        self.call_later(seconds, over.set_result, None)
        self.run_until_complete(over)

    def stop_all(self) -> None:
        """Cancel what still runs, and close."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()
