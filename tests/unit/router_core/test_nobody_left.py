"""No decode worker is left that could go on: who waits for another one, and for how long."""

import numpy as np
import pytest

from cluster.core.config import TimingSettings
from cluster.core.errors import BrokenOff, RequestFailed, Unavailable
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import PromptLogprobs
from tests.unit.router_core.fakes import FakeWorker, expected, request
from tests.unit.router_core.world import Client, World, failure, said, states, submits, world

COMEBACK_S = TimingSettings().comeback_s
SOON_S = 7.0
"""A new request's patience, and a tick."""
STEP_S = 0.25


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
    assert isinstance(begun.outcomes[0], BrokenOff)
    assert failure(begun) == "no decode worker is ready"
    assert not any(made.core.gauges().values())


def waits(made: World, client: Client) -> float:
    """How long until it has ended, while nothing changes."""
    since = made.now
    made.run(steps=int(3 * COMEBACK_S / STEP_S))
    assert client.over
    return made.now - since


def mute(made: World) -> None:
    """From now on attempts go on without a word, as those that think slowly do."""
    for worker in made.workers.values():
        worker.works.clear()


def begun_on(workers: list[FakeWorker]) -> tuple[World, Client]:
    """A stream that has begun on d0 and has long to go."""
    made = World([FakeWorker("p0", "prefill", epoch=1), *workers])
    made.connect()
    client = made.ask(request("begun", prompt=tuple(range(1, 10)), max_tokens=100))
    for _ in range(3):
        made.advance()
    assert client.ids[0]
    assert submits(workers[0]), "it began elsewhere"
    return made, client


@pytest.mark.parametrize("drain_s", [10.0, COMEBACK_S + 1])
def test_a_stream_that_a_draining_worker_hands_over_has_all_its_patience(drain_s: float) -> None:
    worker = FakeWorker("d0", "decode", epoch=5001)
    made, client = begun_on([worker])
    worker.draining = True
    mute(made)
    for _ in range(int(drain_s / STEP_S)):
        made.advance()
    assert (client.outcomes, states(made)["d0:1"]) == ([], "draining")
    handed_over = pb.Preempted(attempt=submits(worker)[-1].attempt, draining=True)
    said(made, "d0", pb.FromDecode(preempted=handed_over))
    made.die("d0:1")
    assert COMEBACK_S <= waits(made, client) <= COMEBACK_S + 1
    assert isinstance(client.outcomes[0], RequestFailed)


def test_a_stream_that_a_suspect_worker_takes_with_it_has_all_its_patience() -> None:
    """Its watch is silent, so it gets no new work, while its session talks on."""
    worker = FakeWorker("d0", "decode", epoch=5001)
    made, client = begun_on([worker])
    mute(made)
    made.watching.clear()
    for _ in range(int((COMEBACK_S + 1) / STEP_S)):
        said(made, "d0", pb.FromDecode(hello=worker.identity()))
        made.advance(connect=False)
    assert (client.outcomes, states(made)["d0:1"]) == ([], "suspect")
    made.watching["d0:1"] = 0
    made.die("d0:1")
    assert COMEBACK_S <= waits(made, client) <= COMEBACK_S + 2  # its session may come back for one


def test_a_worker_that_is_too_small_for_it_is_as_good_as_none() -> None:
    """The large one is being started again; meanwhile it does not matter who else is there."""
    made, client = begun_on([FakeWorker("d0", "decode", epoch=5001), FakeWorker("d1", "decode", epoch=6001, blocks=8)])
    made.die("d0:1")
    for _ in range(int(COMEBACK_S / 2 / STEP_S)):
        made.advance()
    assert client.outcomes == []
    made.workers["d0:1"].restart()
    made.run()
    assert client.ids[0] == expected(client.request, 0)
    assert (client.outcomes, made.idle()) == ([None], True)


def test_nobody_waits_for_ever_beside_a_worker_that_is_too_small() -> None:
    made, client = begun_on([FakeWorker("d0", "decode", epoch=5001), FakeWorker("d1", "decode", epoch=6001, blocks=8)])
    made.die("d0:1")
    assert COMEBACK_S <= waits(made, client) <= COMEBACK_S + 2
    assert "large enough" in failure(client)


def test_where_other_weights_are_all_that_is_left_a_stream_ends_soon() -> None:
    made, client = begun_on([FakeWorker("d0", "decode", epoch=5001)])
    made.workers["d1:1"] = FakeWorker("d1", "decode", epoch=6001, fingerprint=b"other")
    made.workers["p1:1"] = FakeWorker("p1", "prefill", epoch=7001, fingerprint=b"other")
    made.die("d0:1")
    made.apply(made.core.set_members(["p0:1", "p1:1", "d1:1"], made.now))
    assert waits(made, client) <= SOON_S + 1
    assert isinstance(client.outcomes[0], RequestFailed)


def test_a_stream_outlasts_a_time_in_which_no_pair_fits() -> None:
    """A new request is told at once; the stream's own worker is being started again."""
    made, client = begun_on([FakeWorker("d0", "decode", epoch=5001)])
    made.workers["d1:1"] = FakeWorker("d1", "decode", epoch=6001, fingerprint=b"other")
    made.apply(made.core.set_members(["p0:1", "d0:1", "d1:1"], made.now))
    made.die("d0:1")
    for _ in range(int(COMEBACK_S / 2 / STEP_S)):
        made.advance()
    assert client.outcomes == []
    new = made.ask(request("new"))
    assert isinstance(new.outcomes[0], Unavailable)
    made.workers["d0:1"].restart()
    made.run()
    assert client.outcomes == [None]


def test_log_probabilities_of_a_prompt_that_were_delivered_are_a_beginning() -> None:
    made = world()
    client = made.ask(request("scored", prompt=tuple(range(1, 10)))._replace(prompt_logprobs=0))
    mute(made)
    attempt = submits(made.workers["d0:1"])[-1].attempt
    rows = np.full(2, -1.0, "<f4").tobytes(), np.full(2, 1, "<i4").tobytes()
    scored = PromptLogprobs(attempt=attempt, start=1, logprobs=rows[0], ranks=rows[1])
    said(made, "d0", pb.FromDecode(scored=scored))
    assert len(client.scored) == 1
    made.die("d0:1")
    assert COMEBACK_S <= waits(made, client) <= COMEBACK_S + 2
    assert isinstance(client.outcomes[0], RequestFailed)


def test_no_patience_runs_out_while_the_router_itself_sleeps() -> None:
    made, begun, new = left_alone()
    for _ in range(4):
        made.advance()
    made.now += 2 * COMEBACK_S
    made.apply(made.core.tick(made.now))
    assert (begun.outcomes, new.outcomes) == ([], [])
    assert COMEBACK_S - 3 <= waits(made, begun) <= COMEBACK_S
