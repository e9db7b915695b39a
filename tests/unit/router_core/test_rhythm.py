"""How long a worker may be silent: as long as is configured, or longer where it is seen to beat slowly."""

from collections.abc import Iterable

import pytest

from cluster.core.config import TimingSettings
from router.rhythm import LONGEST, Rhythm
from tests.unit.router_core.fakes import FakeWorker, request
from tests.unit.router_core.world import World, states, world

HEARTBEAT_S, SUSPECT_S = TimingSettings().heartbeat_s, TimingSettings().suspect_s


def after(intervals: Iterable[float], suspect_s: float = SUSPECT_S) -> float:
    """The patience with who beat so."""
    rhythm, now = Rhythm(HEARTBEAT_S), 100.0
    rhythm.beat(now)
    for interval in intervals:
        now += interval
        rhythm.beat(now)
    return rhythm.patience_s(suspect_s)


def test_of_who_is_not_known_yet_nothing_is_believed() -> None:
    assert after([]) == after([1.0, 1.0]) == SUSPECT_S


def test_at_the_ordinary_pace_a_frozen_worker_is_found_out_as_soon_as_ever() -> None:
    assert after([HEARTBEAT_S] * 20) == SUSPECT_S
    assert after([HEARTBEAT_S + 0.01] * 20) <= SUSPECT_S + 0.1
    assert after([HEARTBEAT_S, 0.01, HEARTBEAT_S, 2.9] * 5) <= SUSPECT_S + 0.1


@pytest.mark.parametrize(("suspect_s", "patience_s"), [(1.0, 1.0), (1.5, 1.5), (30.0, 30.0)])
def test_at_the_ordinary_pace_it_is_what_is_configured(suspect_s: float, patience_s: float) -> None:
    assert after([HEARTBEAT_S] * 20, suspect_s) == patience_s
    assert after([2 * HEARTBEAT_S] * 20, suspect_s) == 2 * patience_s


@pytest.mark.parametrize("gap_s", [2.9, 60.0])
def test_a_few_long_gaps_blind_nobody(gap_s: float) -> None:
    assert after([HEARTBEAT_S] * 7 + [gap_s] * 3) == SUSPECT_S


def test_a_slow_beat_is_waited_for_and_forgotten_when_it_is_over() -> None:
    assert after([1.0] * 4) == SUSPECT_S / HEARTBEAT_S * 1.0 == 6.0
    assert after([1.0] * 4 + [HEARTBEAT_S] * 7) == SUSPECT_S


@pytest.mark.parametrize("interval_s", [2.0, 1e9])
def test_nobody_talks_himself_immortal(interval_s: float) -> None:
    assert after([interval_s] * 20) == LONGEST * SUSPECT_S


def test_time_in_which_the_router_slept_is_no_interval() -> None:
    rhythm = Rhythm(HEARTBEAT_S)
    for now in range(0, 100, 10):
        rhythm.beat(float(now))
        rhythm.forgive(9.5, now + 9.9)
    assert rhythm.patience_s(SUSPECT_S) == SUSPECT_S


def beating(made: World, every_s: float, seconds: float) -> None:
    """Workers that are well, think without a word, and beat so often."""
    last = made.now
    end = made.now + seconds
    while made.now < end:
        beats = made.now + 0.25 - last >= every_s
        watching = made.watching
        made.watching = watching if beats else {}
        made.now += 0.25
        made.heartbeat()
        made.apply(made.core.tick(made.now))
        made.watching = {**watching, **made.watching}
        last = made.now if beats else last


def test_workers_that_beat_slowly_but_steadily_keep_their_work() -> None:
    """On a machine that is overloaded: beats come every 1.25 s, and now and then one takes far longer."""
    made = world()
    client = made.ask(request("slow", max_tokens=100))
    beating(made, 1.25, 12.0)
    beating(made, 4.0, 4.0)
    assert made.core.counters().get("workers_silent", 0) == 0
    assert (client.outcomes, states(made)["d0:1"]) == ([], "ready")


def test_a_worker_frozen_at_the_ordinary_pace_is_lost_within_the_time_that_is_configured() -> None:
    made = world(decode=2)
    made.ask(request("one", max_tokens=100))
    beating(made, HEARTBEAT_S, 12.0)
    frozen = next(w for w in made.workers.values() if w.role == "decode" and w.works)
    frozen.up = False
    since = made.now
    while not made.core.counters().get("workers_silent"):
        made.advance(0.1)
    assert made.now - since <= SUSPECT_S + 0.2


def test_another_life_has_a_rhythm_of_its_own() -> None:
    worker = FakeWorker("d0", "decode", epoch=5001)
    made = World([FakeWorker("p0", "prefill", epoch=1), worker])
    made.connect()
    beating(made, 1.25, 12.0)
    made.die("d0:1")
    worker.restart()
    for _ in range(2):
        made.advance()
    worker.up = False
    since = made.now
    while not made.core.counters().get("workers_silent"):
        made.advance(0.1)
    assert made.now - since <= SUSPECT_S + 0.2
