"""How often a stream is opened again, on virtual time: soon when it lasted, ever later when it did not."""

import asyncio
import random

from cluster.credentials import Credentials
from router.effects import StreamClosed
from router.links import StreamKeeper
from tests.unit.machines.virtual import VirtualLoop


class Seconds:
    """The loop's own time as a clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.now = loop.time
        self.wall = loop.time


class Silent(StreamKeeper):
    """A stream on which nothing ever comes."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.served: list[float] = []
        self._loop = loop
        super().__init__("d:1", Credentials("a secret"), Seconds(loop), random.Random(seed), self._broke)

    @staticmethod
    def _broke(error: BaseException) -> None:
        raise error

    async def serve(self) -> str:
        self.served.append(self._loop.time())
        await asyncio.Event().wait()
        return "never"

    def report_closed(self, event: StreamClosed) -> None:
        raise AssertionError("a stream that was dropped has no end")


def test_a_watch_with_gap_after_gap_resyncs_ever_more_seldom_until_one_lasts() -> None:
    firsts = set()
    for seed in range(5):
        loop = VirtualLoop()
        keeper = Silent(loop, seed)
        loop.call_soon(keeper.open)
        loop.let_pass(0.1)
        waits = []
        for lasted in (*[0.1] * 8, 6.0, 0.1):
            loop.let_pass(lasted)
            dropped = loop.time()
            loop.call_soon(keeper.reopen)
            loop.let_pass(3.0)
            waits.append(keeper.served[-1] - dropped)
        assert waits[0] <= 0.1
        assert all(1.5 <= wait <= 3.0 for wait in waits[5:8]), "every few seconds, and not all routers at one time"
        assert waits[8] <= 0.1, "one that lasted is opened again at once"
        assert waits[9] <= 0.2
        firsts.add(waits[0])
        loop.run(keeper.close())
        loop.stop_all()
    assert len(firsts) == 5
