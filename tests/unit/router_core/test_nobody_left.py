"""The last decode worker is gone: who waits for another one, and for how long."""

from cluster.core.config import TimingSettings
from cluster.core.errors import RequestFailed, Unavailable
from tests.unit.router_core.fakes import expected, request
from tests.unit.router_core.world import Client, World, failure, world

COMEBACK_S = TimingSettings().comeback_s


def left_alone() -> tuple[World, Client, Client]:
    """A stream that has begun, and a request that came when its worker was gone."""
    made = world()
    begun = made.ask(request("begun", max_tokens=40))
    for _ in range(3):
        made.advance()
    assert begun.ids[0], "nothing was written yet"
    made.die("d0:1")
    return made, begun, made.ask(request("new"))


def test_a_stream_that_has_begun_waits_for_a_worker_longer_than_a_new_request() -> None:
    made, begun, new = left_alone()
    for _ in range(int(COMEBACK_S / 2 / 0.25)):
        made.advance()
    assert isinstance(new.outcomes[0], Unavailable)
    assert begun.outcomes == []
    made.workers["d0:1"].restart()
    made.run()
    assert begun.outcomes == [None]
    assert begun.ids[0] == expected(begun.request, 0)
    assert made.idle()


def test_nobody_waits_for_ever() -> None:
    made, begun, _new = left_alone()
    for _ in range(int(COMEBACK_S / 0.25) - 4):
        made.advance()
    assert begun.outcomes == []
    made.run(steps=8)
    assert isinstance(begun.outcomes[0], RequestFailed)
    assert failure(begun) == "no decode worker is ready"
    assert not any(made.core.gauges().values())
