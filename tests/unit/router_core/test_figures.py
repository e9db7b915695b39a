"""Figures of the fleet: labelled by worker, one row each, pairs of those who talk, restarts counted, zeros told."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from cluster.core.handoff_ends import JOB_ENDS, LOCAL_REASONS
from cluster.stubs.common_pb2 import WorkerIdentity
from cluster.stubs.watch_pb2 import Durations, Pair, Status, WatchEvent, WatchHello
from router.facts import LONGEST_NAME, read_hello
from router.figures import WorkerFigures
from router.front.auth import Gate
from router.front.fleet_metrics import FleetCollector
from router.lives import LEFT_S, LOST_S, MOST_LIVES, Lives
from tests.unit.router_core.fakes import FakeWorker
from tests.unit.router_core.world import World, world

PAIRS = [Pair(prefill=name, jobs_sent=2, jobs={"ok": 1, "link lost": 1}, kv_bytes=640, wire_s=0.5, slots_set_aside=1)
         for name in ("p0", "p1")]  # fmt: skip


def say(made: World, name: str, status: Status) -> None:
    """A status that no fake worker would think of."""
    sequence = made.watching[f"{name}:1"]
    made.watching[f"{name}:1"] = sequence + 1
    made.apply(made.core.on_watch(f"{name}:1", WatchEvent(sequence=sequence, status=status), made.now))


def row(made: World, name: str) -> WorkerFigures:
    (found,) = (each for each in made.core.figures(made.now).workers if each.worker == name)
    return found


def scraped(made: World) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: made.core.figures(made.now), Gate().permits))
    return registry


def test_a_worker_s_series_carry_its_name_and_pool() -> None:
    made = world(prefill=2)
    counters = {"steps": 3, "tokens_out": 9, "local: short prompt": 2, "prefill_local": 2, "kv_bytes": 1280}
    gauges = {"blocks_in_use": 10, "slots_set_aside": 2}
    steps = Durations(bounds_s=[0.1, 1.0], counts=[2, 1, 0], sum_s=0.7)
    say(made, "d0", Status(ready=True, gauges=gauges, cached_blocks=4, counters=counters, steps=steps, pairs=PAIRS))
    value = scraped(made).get_sample_value
    own = {"pool": "decode", "worker": "d0"}
    blocks = {state: value("headrace_worker_blocks", {**own, "state": state}) for state in ("in_use", "cached", "free")}
    assert blocks == {"in_use": 10, "cached": 4, "free": 50}
    assert value("headrace_worker_output_tokens_total", own) == 9
    assert value("headrace_worker_local_prefills_total", {**own, "reason": "short prompt"}) == 2
    assert value("headrace_worker_events_total", {**own, "event": "kv_bytes"}) == 1280
    assert value("headrace_worker_events_total", {**own, "event": "prefill_local"}) is None, "it has its own metric"
    assert value("headrace_worker_step_seconds_bucket", {**own, "le": "1.0"}) == 3
    assert value("headrace_worker_state", {**own, "state": "ready"}) == 1
    assert value("headrace_workers", {"pool": "prefill", "state": "ready"}) == 2
    pair = {"prefill": "p1", "decode": "d0"}
    assert value("headrace_pair_jobs_total", {**pair, "outcome": "link lost"}) == 1
    assert value("headrace_pair_transfer_seconds_total", {**pair, "part": "wire"}) == 0.5
    assert value("headrace_pair_slots_set_aside", pair) == 1


def test_what_a_worker_makes_up_makes_no_more_series_than_there_are_words() -> None:
    """Nor two rows of one pair: a page with the same series twice is none."""
    made = world(prefill=1)
    many = {f"{'w' * 300 if i % 2 else 'w'}{i}": 1 for i in range(1000)}
    pairs = [Pair(prefill="p0", jobs_sent=1, jobs=many), Pair(prefill="p0", jobs_sent=5)]
    say(made, "d0", Status(ready=True, gauges=many, counters=many, pairs=pairs))
    seen = [sample for family in scraped(made).collect() for sample in family.samples]
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in seen]
    assert len(series) == len(set(series))
    assert max(len(value) for sample in seen for value in sample.labels.values()) <= 64
    for name in ("headrace_worker_in_use", "headrace_worker_events_total"):
        told = [sample for sample in seen if sample.name == name and sample.labels["worker"] == "d0"]
        assert len(told) <= 101
        assert sum(sample.value for sample in told) == 1000


@pytest.mark.parametrize("new", ["a{}", "new{}", "~{}"])
def test_no_counter_falls_or_vanishes_whatever_words_come_later(new: str) -> None:
    """Of more words than are told a map has them in any order, and new ones come before old ones in every order."""
    made = world()
    value, before = scraped(made).get_sample_value, dict[str, float]()
    for scrape in range(30):
        words = [new.format(number) for number in range(2 * scrape)] + [f"word{number}" for number in range(120)]
        counters = {word: 1000 * (1 + len(word)) + scrape for word in words}
        say(made, "d0", Status.FromString(Status(ready=True, counters=counters).SerializeToString()))
        told = {event: value("headrace_worker_events_total", {"pool": "decode", "worker": "d0", "event": event})
                for event in (*words, "other")}  # fmt: skip
        now = {event: count for event, count in told.items() if count is not None}
        assert len(now) <= 101
        assert {event: count for event, count in before.items() if now.get(event, -1) < count} == {}
        before = now


def test_words_of_who_is_gone_are_forgotten() -> None:
    made = world(decode=2)
    collector = FleetCollector(lambda: made.core.figures(made.now), Gate().permits)
    assert {series[2] for series in known_words(collector) if series[1:2] == ("decode",)} == {"d0", "d1"}
    made.apply(made.core.set_members(["p0:1", "d0:1"], made.now))
    assert {series[2] for series in known_words(collector) if series[1:2] == ("decode",)} == {"d0"}


def known_words(collector: FleetCollector) -> set[tuple[str, ...]]:
    """Of which series words are remembered, once somebody has looked."""
    list(collector.collect())
    return set(collector._words._let_in)


def test_no_name_is_longer_than_a_label_should_be() -> None:
    hello = WatchHello(identity=WorkerIdentity(worker="w" * 5000, epoch=1, role="decode"))
    assert len(read_hello(hello).name) == LONGEST_NAME


def test_what_has_not_happened_is_told_as_nothing() -> None:
    value = scraped(world()).get_sample_value
    for name, label in (("dispatched", "outcome"), ("attempts_left", "reason")):
        assert value(f"headrace_{name}_total", {label: "failed"}) == 0
    assert value("headrace_router_events_total", {"event": "sessions_broken"}) == 0
    assert (value("headrace_redis_configured"), value("headrace_redis_up")) == (0, 1)


def test_of_a_pair_and_of_a_worker_what_has_not_happened_yet_is_nothing_too() -> None:
    """A first failure would be no change otherwise: from no series to 1."""
    made = world(prefill=2)
    say(made, "d0", Status(ready=True, pairs=PAIRS, counters={"local: short prompt": 2}))
    value = scraped(made).get_sample_value
    pair, own = {"prefill": "p1", "decode": "d0"}, {"pool": "decode", "worker": "d0"}
    for outcome in JOB_ENDS:
        happened = 1 if outcome in ("ok", "link lost") else 0
        assert value("headrace_pair_jobs_total", {**pair, "outcome": outcome}) == happened
    for reason in LOCAL_REASONS:
        happened = 2 if reason == "short prompt" else 0
        assert value("headrace_worker_local_prefills_total", {**own, "reason": reason}) == happened
    other = {"pool": "prefill", "worker": "p0", "reason": "short prompt"}
    assert value("headrace_worker_local_prefills_total", other) is None, "prefill workers do nothing else"


@pytest.mark.parametrize(
    "steps",
    [Durations(bounds_s=[0.1], counts=[1]), Durations(counts=[1, 2]), Durations(bounds_s=[0.1, 1.0], counts=[1] * 4)],
    ids=["short", "boundless", "long"],
)
def test_a_histogram_that_is_none_is_left_out_and_the_rest_of_the_page_is_there(steps: Durations) -> None:
    made = world(prefill=2)
    say(made, "d0", Status(ready=True, steps=steps, counters={"tokens_out": 9}))
    say(made, "p0", Status(ready=True, steps=Durations(bounds_s=[0.1], counts=[2, 1])))
    value = scraped(made).get_sample_value
    assert value("headrace_worker_output_tokens_total", {"pool": "decode", "worker": "d0"}) == 9
    assert value("headrace_worker_step_seconds_count", {"pool": "decode", "worker": "d0"}) is None
    assert value("headrace_worker_step_seconds_count", {"pool": "prefill", "worker": "p0"}) == 3


def test_pairs_with_a_prefill_worker_that_does_not_talk_are_dropped_and_come_back_with_it() -> None:
    made = world(prefill=2)
    say(made, "d0", Status(ready=True, pairs=PAIRS))
    assert [pair.prefill for pair in row(made, "d0").pairs] == ["p0", "p1"]
    made.die("p1:1")
    assert [pair.prefill for pair in row(made, "d0").pairs] == ["p0"]
    assert (row(made, "p1").status, row(made, "p1").state) == (None, "connecting")
    made.workers["p1:1"].up, made.workers["p1:1"].epoch = True, 999
    made.connect()
    assert [pair.prefill for pair in row(made, "d0").pairs] == ["p0", "p1"]
    assert (row(made, "p0").restarts, row(made, "p1").restarts) == (0, 1)


def test_a_worker_that_comes_back_elsewhere_has_one_row_and_has_restarted() -> None:
    made = world()
    made.die("p0:1")
    new = FakeWorker("p0", "prefill", epoch=77)
    made.workers["p0:2"] = new
    made.apply(made.core.set_members(["p0:1", "p0:2", "d0:1"], made.now))
    made.connect()
    assert row(made, "p0").restarts == 1
    assert row(made, "p0").status is not None, "that of the life that talks"


def test_the_page_and_the_metric_count_the_same_restarts_while_an_earlier_life_still_talks() -> None:
    made = world()
    made.workers["p0:2"] = FakeWorker("p0", "prefill", epoch=77)
    made.apply(made.core.set_members(["p0:1", "p0:2", "d0:1"], made.now))
    for _ in range(5):
        made.advance()
    made.close_watch("p0:1")  # and it says hello again
    made.advance()
    (shown,) = (each for each in made.core.overview(made.now).workers if each.name == "p0")
    assert (row(made, "p0").restarts, shown.lives) == (1, 2)
    (told,) = {each["restarts"] for each in made.core._workers.describe(made.now) if each["worker"] == "p0"}
    assert told == 1


@pytest.mark.parametrize("remembered_s", [LEFT_S, LOST_S])
def test_who_is_gone_is_forgotten_though_nobody_looks(remembered_s: float) -> None:
    made = world(prefill=3)
    if remembered_s == LEFT_S:
        say(made, "p1", Status(ready=True, draining=True))
    made.die("p1:1")
    made.die("p2:1")
    left, lives = made.now, made.core._workers.lives
    made.apply(made.core.set_members(["p0:1", "p2:1", "d0:1"], made.now))
    made.now = left + remembered_s
    made.apply(made.core.tick(made.now))
    assert lives.get("p1") is not None
    made.now += 1.0
    made.apply(made.core.tick(made.now))
    assert lives.get("p1") is None
    assert lives.get("p2") is not None, "it is a member and may come back"


def test_lives_are_remembered_of_a_bounded_few() -> None:
    lives = Lives()
    for number in range(1, MOST_LIVES + 10):
        lives.heard(f"worker-{number}", "decode", 1, 0.0, leaving=False)
        lives.heard("worker-0", "decode", number, 0.0, leaving=False)
    assert lives.restarts("worker-0") == MOST_LIVES + 8
    assert (lives.restarts("worker-1"), len(lives._lives)) == (0, MOST_LIVES)


def test_each_number_of_a_worker_is_told_under_its_own_name() -> None:
    """All different, so that no two of them can be mixed up."""
    made = world(decode=1)
    gauges = {"blocks_in_use": 10, "slots_in_use": 31, "slots_set_aside": 32}
    counters = {"prompt_tokens_computed": 21, "prefix_hit_tokens": 22, "tokens_out": 23, "steps": 24}
    status = Status(ready=True, running=11, waiting=12, handing_off=13, queued_tokens=14, context_tokens=15,
                    gauges=gauges, counters=counters, pairs=PAIRS[:1])  # fmt: skip
    say(made, "d0", status)
    figures = made.core.figures(made.now)
    (told,) = (each for each in figures.workers if each.worker == "d0")
    told.age_s, told.tokens_per_s, told.links, told.restarts = 0.25, 41.5, {"p0": 42.5, "p1": 43.5}, 44
    index = {"entries": 51, "capacity": 52, "refused": 53}
    requests = {"queued": 61, "queued_tokens": 62, "attempts": 63, "bookings": 64}
    shown = replace(figures, prefix_index=index, gauges=requests, members=65, told_s=66.5)
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: shown, Gate().permits))
    own, pair = {"pool": "decode", "worker": "d0"}, {"prefill": "p0", "decode": "d0"}
    expected: dict[str, tuple[float, dict[str, str]]] = {
        "worker_batch_sequences": (11, own),
        "worker_waiting_requests": (12, own),
        "worker_handing_off_requests": (13, own),
        "worker_queued_tokens": (14, own),
        "worker_context_tokens": (15, own),
        "worker_prompt_tokens_computed_total": (21, own),
        "worker_prefix_hit_tokens_total": (22, own),
        "worker_output_tokens_total": (23, own),
        "worker_status_age_seconds": (0.25, own),
        "worker_prefill_tokens_per_second": (41.5, own),
        "worker_restarts_total": (44, own),
        "pair_link_bytes_per_second": (42.5, pair),
        "prefix_index_entries": (51, {}),
        "prefix_index_capacity": (52, {}),
        "prefix_index_refused_total": (53, {}),
        "queue_requests": (61, {}),
        "queue_tokens": (62, {}),
        "attempts_running": (63, {}),
        "bookings": (64, {}),
        "members": (65, {}),
        "controller_age_seconds": (66.5, {}),
    }
    value = registry.get_sample_value
    assert {name: value(f"headrace_{name}", labels) for name, (_, labels) in expected.items()} == {
        name: number for name, (number, _) in expected.items()
    }
    slots = {state: value("headrace_worker_slots", {**own, "state": state}) for state in ("in_use", "set_aside")}
    assert slots == {"in_use": 31, "set_aside": 32}
    assert value("headrace_worker_slots", {"pool": "prefill", "worker": "p0", "state": "in_use"}) is None
