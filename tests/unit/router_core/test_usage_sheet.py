"""Usage survives any order of writes: repeated, late, lost, unanswered, cut off by a router's death, over days."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.clock import ManualClock
from cluster.usage import (
    NOTHING,
    OPEN_DAYS,
    Closed,
    Day,
    LocalUsage,
    Rows,
    Sums,
    UsageUnavailable,
    Who,
    day_from,
    day_of,
    iso,
)
from router.ledger import Ledger
from router.sheet import Sheet

ACME, OTHER = Who("acme", "m"), Who("", "m")
ONE = Sums(1, 10, 4, 3, 40, 12)


T = TypeVar("T")


def at_once(call: Coroutine[object, None, T]) -> T:
    """What never waits needs no loop."""
    try:
        call.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("it waits")


def times(sums: Sums, count: int) -> Sums:
    return Sums(*(count * each for each in sums))


@dataclass
class Router:
    """One life: what it has counted, and what was handed over to its clients."""

    epoch: int
    sheet: Sheet = field(default_factory=Sheet)
    counted: dict[Who, int] = field(default_factory=dict)
    settled: dict[Who, int] = field(default_factory=dict)
    doubted: dict[Who, int] = field(default_factory=dict)

    def refused(self, day: Day, today: Day) -> None:
        """What an unanswered message may have brought before a day was closed is not told again: nobody pays twice."""
        for who, line in self.sheet._days[day].items():
            self.doubted[who] = self.doubted.get(who, 0) + line.perhaps.requests
        self.sheet.refused(day, today)


class Usage(RuleBasedStateMachine):
    """Two routers' places, one book, one network that does what it likes."""

    @initialize()
    def start(self) -> None:
        self.today: Day = 20_000
        self.book = LocalUsage(lambda: self.today)
        self.routers = [Router(0), Router(1)]
        self.dead: list[Router] = []
        self.epochs = 2
        self.under_way: list[tuple[int, Day, Rows]] = []

    def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        return at_once(self.book.write(epoch, day, rows))

    @rule(place=st.integers(0, 1), who=st.sampled_from([ACME, OTHER]), skew=st.integers(-1, 1))
    def count(self, place: int, who: Who, skew: int) -> None:
        router = self.routers[place]
        router.sheet.add(self.today + skew, who, ONE)
        router.counted[who] = router.counted.get(who, 0) + 1

    @rule(place=st.integers(0, 1), answers=st.lists(st.booleans(), min_size=4, max_size=4), late=st.booleans())
    def flush(self, place: int, answers: list[bool], late: bool) -> None:
        """Each day is one message: it arrives or not, now or later, and its answer too."""
        router = self.routers[place]
        for (day, rows), answered in zip(router.sheet.unwritten().items(), answers, strict=False):
            self.under_way.append((router.epoch, day, rows))
            if late or not answered:
                router.sheet.doubtful(day, rows)
                if not late:
                    self.write(router.epoch, day, rows)
                continue
            closed = self.write(router.epoch, day, rows)
            if closed is None:
                router.sheet.written(day, rows)
            else:
                router.refused(day, closed.today)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        """Any message of the past, in any order, as often as the network likes."""
        self.write(*data.draw(st.sampled_from(self.under_way)))

    @rule(place=st.integers(0, 1))
    def settle(self, place: int) -> None:
        """Everything is written and answered: from now on it outlives the router."""
        router = self.routers[place]
        while rows := router.sheet.unwritten():
            for day, these in rows.items():
                closed = self.write(router.epoch, day, these)
                if closed is None:
                    router.sheet.written(day, these)
                else:
                    router.refused(day, closed.today)
        router.settled = dict(router.counted)

    @rule(place=st.integers(0, 1))
    def die(self, place: int) -> None:
        self.dead.append(self.routers[place])
        self.routers[place] = Router(self.epochs)
        self.epochs += 1

    @rule()
    def next_day(self) -> None:
        self.today += 1

    @rule()
    def fold(self) -> None:
        at_once(self.book.fold())

    @rule(place=st.integers(0, 1))
    def recall(self, place: int) -> None:
        self.routers[place].sheet.recall()

    @rule(place=st.integers(0, 1))
    def forget(self, place: int) -> None:
        self.routers[place].sheet.forget(self.today)

    @invariant()
    def nothing_is_lost_that_was_settled_and_nothing_counts_twice(self) -> None:
        days = at_once(self.book.read(0, 30_000))
        for who in (ACME, OTHER):
            kept = NOTHING
            for rows in days.values():
                kept = kept.plus(rows.get(who, NOTHING))
            every = [*self.routers, *self.dead]
            sure = (max(0, router.settled.get(who, 0) - router.doubted.get(who, 0)) for router in every)
            least = times(ONE, sum(sure))
            most = times(ONE, sum(router.counted.get(who, 0) for router in every))
            assert kept.joined(least) == kept, (who, kept, least)
            assert kept.joined(most) == most, (who, kept, most)

    @invariant()
    def a_router_knows_what_it_counted(self) -> None:
        for router in self.routers:
            assert router.sheet.total() == {who: times(ONE, n) for who, n in router.counted.items()}


TestUsage = Usage.TestCase
TestUsage.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_sums_of_one_epoch_join_in_any_order(seen: list[tuple[int, int]]) -> None:
    forth, back = NOTHING, NOTHING
    for pair in seen:
        forth = forth.joined(Sums(*pair)).joined(Sums(*pair))
    for pair in reversed(seen):
        back = back.joined(Sums(*pair))
    assert forth == back


def test_what_a_closed_day_cannot_have_counts_as_of_today_and_never_twice() -> None:
    """A message without an answer, then a book that was away for days: it may have the message, so that is not told."""
    sheet = Sheet()
    sheet.add(100, ACME, ONE)
    sheet.doubtful(100, sheet.unwritten()[100])
    sheet.add(100, ACME, ONE)
    assert sheet.refused(100, 103)
    assert sheet.unwritten() == {103: {ACME: ONE}}
    assert sheet.total() == {ACME: times(ONE, 2)}
    assert not sheet.refused(103, 110) or sheet.unwritten() == {110: {ACME: ONE}}


async def test_folded_days_take_the_room_of_one_epoch() -> None:
    today = 100
    book = LocalUsage(lambda: today, keep_days=10)
    for epoch in range(20):
        await book.write(epoch, 100, {ACME: ONE, OTHER: ONE})
    assert book.size() == 40
    today += OPEN_DAYS
    await book.fold()
    assert book.size() == 40, "still open"
    today += 1
    await book.fold()
    assert book.size() == 2
    assert await book.read(0, 200) == {100: {ACME: times(ONE, 20), OTHER: times(ONE, 20)}}
    today += 10
    await book.fold()
    assert book.size() == 0


def test_a_sheet_does_not_grow_with_days() -> None:
    sheet = Sheet()
    for day in range(50):
        sheet.add(day, ACME, ONE)
        for each, rows in sheet.unwritten().items():
            sheet.written(each, rows)
        sheet.forget(day)
    sheet.recall()
    assert set(sheet.unwritten()) == {47, 48, 49}
    assert sheet.total() == {ACME: times(ONE, 50)}


def test_days_are_those_of_utc() -> None:
    assert (iso(0), iso(day_of(86_399.9)), iso(day_of(86_400))) == ("1970-01-01", "1970-01-01", "1970-01-02")
    assert day_from("2026-11-30") == day_of(1_796_000_400.0)
    with pytest.raises(ValueError, match="Invalid isoformat"):
        day_from("yesterday")


class Unreliable(LocalUsage):
    """A book that answers or not, and says when it is written to."""

    def __init__(self) -> None:
        super().__init__(lambda: day_of(ManualClock().wall()))
        self.up = True
        self.writes = 0
        self.hold: asyncio.Event | None = None
        self.folding: asyncio.Event | None = None

    async def write(self, epoch: int, day: Day, rows: Rows) -> Closed | None:
        self.writes += 1
        if self.hold is not None:
            await self.hold.wait()
        if not self.up:
            raise UsageUnavailable("usage: away")
        return await super().write(epoch, day, rows)

    async def fold(self) -> None:
        if self.folding is not None:
            await self.folding.wait()
        if not self.up:
            raise UsageUnavailable("usage: away")
        await super().fold()


async def kept(book: LocalUsage) -> dict[Who, Sums]:
    days = await book.read(0, 30_000)
    return next(iter(days.values()), {})


async def test_the_end_of_an_answer_waits_for_the_book_and_many_wait_together() -> None:
    book = Unreliable()
    ledger = Ledger(ManualClock(), book, epoch=1, shared=True)
    serving = asyncio.create_task(ledger.serve())
    try:
        await ledger.settled()
        assert book.writes == 0, "nothing to write"
        book.hold = asyncio.Event()
        ends = []
        for _ in range(20):
            ledger.add(ACME, ONE)
            ends.append(asyncio.create_task(ledger.settled()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(end.done() for end in ends)
        book.hold.set()
        await asyncio.gather(*ends)
        assert await kept(book) == {ACME: times(ONE, 20)}
        assert book.writes == 1
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_nobody_waits_for_a_book_that_is_away_and_it_is_told_everything_later() -> None:
    book = Unreliable()
    ledger = Ledger(ManualClock(), book, epoch=1, shared=True)
    ledger.add(ACME, ONE)
    await ledger.write()
    book.up = False
    ledger.add(OTHER, ONE)
    waiting = asyncio.create_task(ledger.settled())
    await asyncio.sleep(0)
    await ledger.write()
    await waiting
    assert not ledger.book_up
    await ledger.settled()
    fresh = Unreliable()  # it comes back without what it had
    ledger._book = fresh
    await ledger.write()
    assert ledger.book_up
    assert await kept(fresh) == {ACME: ONE, OTHER: ONE}
    assert ledger.waiting() == 0


async def test_ends_that_wait_are_let_go_when_a_fold_finds_the_book_away() -> None:
    """Not when the next write finds it too: that is a second's rest and another patience later."""
    book = Unreliable()
    book.folding = asyncio.Event()
    ledger = Ledger(ManualClock(), book, epoch=1, shared=True)
    serving = asyncio.create_task(ledger.serve())
    try:
        for _ in range(3):
            await asyncio.sleep(0)
        ledger.add(ACME, ONE)
        end = asyncio.create_task(ledger.settled())
        await asyncio.sleep(0)
        assert not end.done()
        book.up = False
        book.folding.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert end.done()
        assert (ledger.book_up, book.writes) == (False, 0)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_what_is_left_is_written_when_a_router_leaves() -> None:
    book = Unreliable()
    ledger = Ledger(ManualClock(), book, epoch=1, shared=True)
    serving = asyncio.create_task(ledger.serve())
    for _ in range(3):
        await asyncio.sleep(0)
    ledger.add(ACME, ONE)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert await kept(book) == {ACME: ONE}
    ledger.add(ACME, ONE)
    await ledger.settled()  # of a ledger that nobody keeps any more
