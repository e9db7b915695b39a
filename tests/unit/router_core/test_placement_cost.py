"""The cost of a choice in milliseconds, and that `cost` takes the least (router/placement/estimate.py)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from router.placement import POLICIES, Demand, Placement, Rates, Snapshot, StepCell, Wait, WorkerLoad
from router.placement.estimate import displaced, estimate
from tests.unit.router_core.test_router_placement import LONG, chosen, worker

BASE_SHAPE = worker("any").shape
FAST = Rates(prefill=((4096, 2000.0),), steps=(StepCell(10, 10_000, 20.0),), links={worker("p0").epoch: 1.0})


def cheapest(demand: Demand, decode: list[WorkerLoad], prefill: list[WorkerLoad], seed: int = 0) -> Placement:
    return chosen("cost", demand, decode, prefill, seed)


@pytest.mark.parametrize(
    ("d0", "d1", "winner"),
    [
        ({"active": 3}, {"active": 2}, "d1"),
        ({"active": 3, "context": 9_000}, {"active": 3, "context": 90_000}, "d0"),
        ({"active": 9, "rates": Rates(steps=(StepCell(9, 0, 1.0),))}, {"active": 2}, "d0"),
        ({"active": 2, "rates": Rates(links={worker("p0").epoch: 0.001})}, {"active": 2}, "d1"),
        ({"active": 4, "cached_tokens": 320}, {"active": 4}, "d0"),
        ({"active": 200, "cached_tokens": 320}, {"active": 2}, "d1"),
        ({"cooling": True}, {"cooling": True, "active": 1}, "d0"),
    ],
)
def test_which_decode_worker(d0: dict[str, object], d1: dict[str, object], winner: str) -> None:
    shape = replace(BASE_SHAPE, layout=(32, 8, 128, 16, "bfloat16"))
    decode = [worker("d0", **{"shape": shape, **d0}), worker("d1", **{"shape": shape, **d1})]
    assert cheapest(LONG, decode, [worker("p0", shape=shape)]).decode.address == winner


@pytest.mark.parametrize(
    ("p0", "p1", "first"),
    [
        ({"queue": (500,)}, {}, "p1"),
        ({"queue": (500,), "cached_tokens": 640}, {}, "p0"),
        ({"queue": (900,), "cached_tokens": 400}, {}, "p1"),
        ({"rates": Rates(prefill=((4096, 500.0),))}, {"queue": (800,)}, "p1"),
        ({"queue": (9000,)}, {"queue": (900, 900)}, "p0"),
        ({"queue": (3000,), "cached_tokens": 900}, {"queue": (50,) * 8}, "p0"),
    ],
)
def test_which_prefill_worker_comes_first(p0: dict[str, object], p1: dict[str, object], first: str) -> None:
    result = cheapest(LONG, [worker("d0", active=9, queue=(4000,))], [worker("p0", **p0), worker("p1", **p1)])
    assert [p.address for p in result.prefill] == [first, "p1" if first == "p0" else "p0"]
    assert not result.local


def test_the_estimate_is_the_documented_sum() -> None:
    decode = worker("d0", cached_tokens=160, active=2, context=3000, rates=FAST)
    prefill = worker("p0", cached_tokens=320, queue=(100, 5000), rates=FAST)
    step = 20 * (1 + 3 / 32 + 4000 / 262_144) / (1 + 10 / 32 + 10_000 / 262_144)
    remote = estimate(decode, prefill, LONG)
    assert remote.queue_ms == pytest.approx((100 + 680 + 128) / 2)
    assert remote.compute_ms == pytest.approx(680 / 2)
    assert remote.transfer_ms == pytest.approx(840 * decode.shape.kv_bytes / 1e6)
    assert remote.decode_ms == pytest.approx(32 * step)
    assert remote.total_ms == remote.queue_ms + remote.compute_ms + remote.transfer_ms + remote.decode_ms
    assert estimate(decode, prefill, replace(LONG, max_tokens=5)).decode_ms == pytest.approx(5 * step)


def test_a_decode_worker_that_reads_by_itself_does_so_between_the_steps_of_its_streams() -> None:
    decode = worker("d0", cached_tokens=160, queue=(60,), rates=replace(FAST, local_chunk_tokens=100))
    idle = estimate(decode, None, LONG)
    assert idle.queue_ms == pytest.approx((60 + 128) / 2)
    assert idle.compute_ms == pytest.approx(840 / 2)
    assert idle.decode_ms - estimate(decode, worker("p0"), LONG).decode_ms == pytest.approx(840 / 2)
    busy = replace(decode, active=10, context=10_000)
    between = estimate(busy, None, LONG)
    assert between.queue_ms == pytest.approx((60 + 128) / 2 + 9 * 20)
    harm = between.decode_ms - estimate(busy, worker("p0"), LONG).decode_ms
    assert harm == pytest.approx(840 / 2)


def test_a_prompt_adds_to_the_waiting_of_all() -> None:
    assert displaced((), 100) == 0
    assert displaced((30, 40), 100) == 70
    assert displaced((30, 4000), 100) == 130


@pytest.mark.parametrize(
    ("decode", "prefill", "local"),
    [
        ({}, {}, False),
        ({"active": 9}, {}, False),
        ({"active": 9, "cached_tokens": 900}, {}, True),
        ({"active": 9, "cached_tokens": 900}, {"cached_tokens": 990}, False),
        ({"active": 9, "cached_tokens": 800}, {"queue": (100,) * 100}, True),
        ({"active": 9, "cached_tokens": 800}, {"queue": (100,) * 100, "cooling": True}, True),
        ({"active": 9, "cached_tokens": 800, "queue": (200,) * 100}, {"queue": (100,) * 100}, False),
        ({}, {"queue": (100,)}, False),
        ({}, {"queue": (800,)}, False),
        ({}, {"queue": (400,) * 5}, True),
    ],
)
def test_decode_reads_the_prompt_where_that_is_cheaper(
    decode: dict[str, object], prefill: dict[str, object], local: bool
) -> None:
    """Mostly cached, or the prefill workers behind; never for a prompt that a prefill worker would soon have read."""
    result = cheapest(LONG, [worker("d0", **decode)], [worker("p0", **prefill)])
    assert result.local == local
    told = result.local_max_tokens
    assert told >= 1000 - result.decode.cached_tokens if local else told == LONG.local_max_tokens


def test_dear_reading_on_decode_is_no_way_out_of_waiting() -> None:
    snapshot = Snapshot((worker("d0", active=30, queue=(4000,)),), (worker("p0", queue=(10,), cooling=True),))
    assert POLICIES["cost"]().place(LONG, snapshot, random.Random(0)) == Wait("prefill workers are busy", "p0")


def test_what_was_compared_is_told() -> None:
    """The chosen pair first, then the next best, each with the terms that make its cost."""
    decode = [worker("d0", active=1), worker("d1", active=90)]
    result = cheapest(LONG, decode, [worker("p0"), worker("p1", queue=(9,)), worker("p2", queue=(900,))])
    assert [(pair.decode, pair.prefill) for pair in result.considered] == [("d0", "p0"), ("d0", "p1"), ("d1", "p0")]
    assert set(result.considered[0].terms_ms) == {"queue", "compute", "transfer", "decode"}
    alone = cheapest(LONG, [worker("d0", cached_tokens=980)], [worker("p0")]).considered
    assert [(pair.prefill, set(pair.terms_ms)) for pair in alone] == [("", {"queue", "compute", "decode"})]


def test_equal_workers_are_drawn_at_random() -> None:
    decode, prefill = [worker(f"d{i}", active=1) for i in range(4)], [worker(f"p{i}") for i in range(4)]
    results = [cheapest(LONG, decode, prefill, seed) for seed in range(400)]
    for counts in (Counter(r.decode.address for r in results), Counter(r.prefill[0].address for r in results)):
        assert min(counts.values()) > 60


def test_workers_that_are_nearly_equal_are_drawn_from_too_and_no_others() -> None:
    """Routers that see nearly the same do not all choose the best (P03): 900 and 901 positions in line, or 9,000."""
    queues = {"p0": (900,), "p1": (901,), "p2": (9000,)}
    prefill = [worker(name, queue=queue, rates=FAST) for name, queue in queues.items()]
    decode = [worker("d0", active=9, queue=(9000,) * 9, rates=FAST)]
    counts = Counter(cheapest(LONG, decode, prefill, seed).prefill[0].address for seed in range(200))
    assert set(counts) == {"p0", "p1"}
    assert min(counts.values()) > 60


def test_a_hot_prefix_does_not_pull_everything_to_one_worker() -> None:
    """P01: 4 prefill workers, one has the system prompt; every placement queues its positions there."""
    queues: dict[str, tuple[int, ...]] = {f"p{i}": () for i in range(4)}
    for seed in range(100):
        prefill = [worker(n, queue=q, cached_tokens=800 if n == "p0" else 0) for n, q in queues.items()]
        first = cheapest(LONG, [worker("d0", active=9, queue=(1000,) * 100)], prefill, seed).prefill[0]
        queues[first.address] += (1000 - first.cached_tokens,)
    queued = [sum(queue) for queue in queues.values()]
    assert max(queued) <= 1.5 * sum(queued) / 4
