"""Who used how much, counted as answers are handed over, and kept where it outlives this router (docs/usage.md).

    ledger = Ledger(clock, book, epoch=epoch, shared=True)
    keeping = asyncio.create_task(ledger.serve())
    with ledger.follow(receipt):                             # it counts, when it is asked to
        ledger.add(who, sums)
        await ledger.settled()                               # before the last byte of an answer

1. *Add* counts, at once and in memory.
2. *Settled* returns when all that was counted is in the shared book, so whoever has the end of an answer is in it,
   whatever becomes of this router. All that ended meanwhile is written together, at most every PACE_S.
3. Running answers are asked every WRITE_S what of them was handed over, and that is written too.
4. *Without the book* (it does not answer, once) nobody waits for it. It is tried again every PROBE_S; when it answers
   it is told everything there is, in case it comes back with less than it had.
A book of this process is written to in the same way, but nobody waits for it.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from cluster.core.clock import Clock
from cluster.usage import Day, Rows, Sums, UsageBook, UsageUnavailable, Who, day_of
from router.sheet import Sheet

PACE_S = 0.02
WRITE_S = 1.0
PROBE_S = 1.0
FOLD_S = 3600.0
_log = logging.getLogger(__name__)


class Counting(Protocol):
    """An answer under way."""

    def tell(self) -> None:
        """Add what is not added yet."""


class Ledger:
    """One per router life. `shared`: the book is other routers' too. `serve` must run with a shared book."""

    def __init__(self, clock: Clock, book: UsageBook, *, epoch: int, shared: bool = False) -> None:
        self._clock = clock
        self._book = book
        self._epoch = epoch
        self._sheet = Sheet()
        self._writing = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._folded = -FOLD_S
        self._running: set[Counting] = set()
        self._asked = clock.now()
        self.shared = shared
        self.book_up = True

    def add(self, who: Who, sums: Sums) -> None:
        """Count, as of today (UTC)."""
        self._sheet.add(self.today(), who, sums)

    async def settled(self) -> None:
        """Until all that was counted is in the shared book, or it is known to be away."""
        if not (self.shared and self.book_up and self._sheet.waiting()):
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._wanted.set()
        await done

    @contextmanager
    def follow(self, answer: Counting) -> Iterator[None]:
        """Around an answer; when it is left, all of it has been added."""
        self._running.add(answer)
        try:
            yield
        finally:
            self._running.discard(answer)
            self._wanted.set()  # it may have ended early; nobody waits for that

    async def serve(self) -> None:
        """Write, until cancelled; then once more."""
        try:
            while True:
                if self._clock.now() - self._asked >= WRITE_S:
                    self._ask()
                await self.write()
                await self._fold()
                await asyncio.sleep(PACE_S if self.book_up else PROBE_S)
                await self._wait()
        finally:
            try:
                self._ask()
                await self.write()
            finally:
                self.book_up = False
                self._let_go(self._waiting)
                await self._book.close()

    async def write(self) -> None:
        """Tell the book all that it does not have; notes whether it answers."""
        async with self._writing:
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                if not self.book_up:
                    self._sheet.recall()
                for day, rows in self._sheet.unwritten().items():
                    await self._tell(day, rows)
            except UsageUnavailable as error:
                self._note(error)
            else:
                self._note(None)
                self._sheet.forget(self.today())
            finally:
                self._let_go(waiting)

    async def read(self, since: Day, until: Day) -> dict[Day, dict[Who, Sums]]:
        """What all routers have told the book, this one until now. Raises UsageUnavailable."""
        self._ask()
        await self.write()
        return await self._book.read(since, until)

    def total(self) -> dict[Who, Sums]:
        """What this life has counted."""
        self._ask()
        return self._sheet.total()

    def waiting(self) -> int:
        """Sums that the book does not have yet."""
        return self._sheet.waiting()

    def today(self) -> Day:
        """As this router's clock has it."""
        return day_of(self._clock.wall())

    def _ask(self) -> None:
        self._asked = self._clock.now()
        for answer in self._running:
            answer.tell()

    async def _tell(self, day: Day, rows: Rows) -> None:
        kept = False
        try:
            closed = await self._book.write(self._epoch, day, rows)
            kept = True
        finally:
            if not kept:  # no answer, or nobody waited for it
                self._sheet.doubtful(day, rows)
        if closed is None:
            self._sheet.written(day, rows)
        else:
            if self._sheet.refused(day, closed.today):
                _log.warning("usage of a day that is closed counts as of today: is this machine's clock right?")
            self._wanted.set()

    async def _fold(self) -> None:
        if self.book_up and self._clock.now() - self._folded >= FOLD_S:
            try:
                await self._book.fold()
                self._folded = self._clock.now()
            except UsageUnavailable as error:
                self._note(error)

    async def _wait(self) -> None:
        """Until somebody wants to be settled, or it is time."""
        try:
            await asyncio.wait_for(self._wanted.wait(), WRITE_S)
        except TimeoutError:
            return

    def _note(self, error: UsageUnavailable | None) -> None:
        up = error is None
        if up != self.book_up:
            _log.warning("usage is written again" if up else f"usage cannot be written ({error}): counted on, here")
        self.book_up = up
        if not up:  # nobody waits for it
            self._let_go(self._waiting)

    @staticmethod
    def _let_go(waiting: list[asyncio.Future[None]]) -> None:
        while waiting:
            if not (done := waiting.pop()).done():
                done.set_result(None)
