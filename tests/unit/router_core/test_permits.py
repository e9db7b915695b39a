"""Permits beside a shared book that is away: no tenant pays for it."""

from cluster.quotas import Quota
from router.permits import Permits
from router.tenants import Tenant
from simulation.limits import SharedBook
from simulation.loop import Loop


async def test_what_was_used_is_not_charged_with_every_try() -> None:
    """The book does what it is asked, but its answers are lost: seed 10030 of the simulation."""
    loop = Loop(0)
    book = SharedBook(loop)
    tenant = Tenant("t", Quota(tokens_per_minute=60))
    one, other = Permits(loop.clock, book), Permits(loop.clock, book)
    async with one.hold(tenant, 10) as permit:
        book.leave(10.0, deaf=False)
        permit.written = 10
    for second in range(1, 12):
        loop.now = 100.0 + second
        await one.tell()
    assert one.shared_up
    async with other.hold(tenant, 25):  # 60 less 10 and, at worst, twice 10; some of it has come back since
        pass
