"""Placement as tables: who is chosen, for which reason."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from router.placement import Demand, NoPair, Placement, Shape, Snapshot, Wait, WorkerLoad, difference, place

SHAPE = Shape(1, (2, 2, 8, 16, "float32"), b"weights")
OTHER = replace(SHAPE, fingerprint=b"other weights")
BASE = WorkerLoad("", "", 0, SHAPE, max_context=4096, num_blocks=256, room_blocks=256, tokens_per_s=1000.0, step_s=0.01)
LONG = Demand(prompt_tokens=1000, histories=(0,), max_tokens=100, local_max_tokens=64)
SHORT = replace(LONG, prompt_tokens=50)


def worker(name: str, **changes: object) -> WorkerLoad:
    return replace(BASE, address=name, name=name, epoch=sum(name.encode()), **changes)  # type: ignore[arg-type]


def chosen(demand: Demand, decode: list[WorkerLoad], prefill: list[WorkerLoad], seed: int = 0) -> Placement:
    result = place(demand, Snapshot(tuple(decode), tuple(prefill)), random.Random(seed))
    assert isinstance(result, Placement), result
    return result


@pytest.mark.parametrize(
    ("d0", "d1", "winner"),
    [
        ({"active": 3}, {"active": 2}, "d1"),
        ({"active": 3, "step_s": 0.001}, {"active": 2, "step_s": 0.1}, "d0"),
        ({"room_blocks": 10}, {"active": 9}, "d1"),
        ({"cached_tokens": 960}, {}, "d0"),
        ({"cached_tokens": 960, "active": 500}, {}, "d1"),
        ({"cooling": True}, {"active": 9}, "d1"),
        ({"cooling": True}, {"cooling": True, "active": 1}, "d0"),
        ({"max_context": 1000}, {"active": 9}, "d1"),
        ({"num_blocks": 60, "room_blocks": 60}, {"active": 9}, "d1"),
        ({"shape": OTHER}, {"active": 9}, "d1"),
    ],
)
def test_which_decode_worker(d0: dict[str, object], d1: dict[str, object], winner: str) -> None:
    result = chosen(LONG, [worker("d0", **d0), worker("d1", **d1)], [worker("p0")])
    assert result.decode.address == winner


def test_it_tells_what_was_compared() -> None:
    """The chosen pair first, each with the terms that make its cost; local where decode prefills by itself."""
    decode = [worker("d0", active=3), worker("d1"), worker("d2", active=1), worker("d3", active=9)]
    result = chosen(LONG, decode, [worker("p0"), worker("p1", queued_tokens=500)])
    assert [(pair.decode, pair.prefill) for pair in result.considered] == [("d1", "p0"), ("d2", "p0"), ("d0", "p0")]
    assert sum(result.considered[0].terms_ms.values()) == result.estimate_ms
    assert result.considered[0].terms_ms == {"decode": 0.0, "prefill": 1000.0, "transfer": 10.0}
    local = chosen(SHORT, [worker("d0")], [worker("p0")])
    assert [(pair.prefill, set(pair.terms_ms)) for pair in local.considered] == [("", {"decode", "prefill"})]


@pytest.mark.parametrize(
    ("p0", "p1", "first"),
    [
        ({"queued_tokens": 500}, {}, "p1"),
        ({"queued_tokens": 500, "cached_tokens": 640}, {}, "p0"),
        ({"queued_tokens": 900, "cached_tokens": 640}, {}, "p1"),
        ({"tokens_per_s": 500.0}, {"queued_tokens": 900}, "p1"),
        ({"cooling": True}, {"queued_tokens": 9000}, "p1"),
    ],
)
def test_which_prefill_worker_comes_first(p0: dict[str, object], p1: dict[str, object], first: str) -> None:
    result = chosen(LONG, [worker("d0")], [worker("p0", **p0), worker("p1", **p1)])
    assert [p.address for p in result.prefill] == [first, "p1" if first == "p0" else "p0"]
    assert not result.local


def test_at_most_three_prefill_workers_and_only_fitting_ones() -> None:
    prefill = [worker(f"p{i}") for i in range(5)] + [worker("odd", shape=OTHER), worker("small", num_blocks=10)]
    result = chosen(LONG, [worker("d0")], prefill)
    assert len(result.prefill) == 3
    assert not {p.address for p in result.prefill} & {"odd", "small"}


def test_the_estimate_is_the_documented_sum() -> None:
    decode = worker("d0", cached_tokens=160, active=2, step_s=0.02)
    prefill = worker("p0", cached_tokens=320, queued_tokens=100, tokens_per_s=2000.0)
    result = chosen(LONG, [decode], [prefill])
    assert result.estimate_ms == pytest.approx((100 + 680) / 2 + 840 * 0.01 + 2 * 20)
    local = chosen(LONG, [replace(decode, queued_tokens=60, tokens_per_s=500.0)], [])
    assert local.estimate_ms == pytest.approx((60 + 840) * 2 + 2 * 20)


@pytest.mark.parametrize(
    ("demand", "cached", "prefill", "local", "listed"),
    [
        (LONG, 0, True, False, 1),
        (LONG, 0, False, True, 0),
        (SHORT, 0, True, True, 1),
        (LONG, 944, True, True, 1),
        (replace(LONG, force_local=True), 0, True, True, 0),
    ],
)
def test_who_computes_the_prompt(demand: Demand, cached: int, prefill: bool, local: bool, listed: int) -> None:
    result = chosen(demand, [worker("d0", cached_tokens=cached)], [worker("p0")] if prefill else [])
    assert (result.local, len(result.prefill)) == (local, listed)


@pytest.mark.parametrize(
    ("demand", "blocks"),
    [
        (LONG, 63 + 1),
        (replace(LONG, histories=(0, 0, 0)), 63 + 3),
        (replace(LONG, histories=(17, 0)), 63 + 2 + 2),
        (replace(LONG, worst_case=True), 62 + 7),
        (replace(LONG, histories=(100,), max_tokens=100), 62 + 7),
        (replace(LONG, prompt_tokens=1024, max_tokens=1), 64 + 1),
    ],
)
def test_it_waits_until_there_is_room_for_prompt_history_and_growth(demand: Demand, blocks: int) -> None:
    full = Snapshot((worker("d0", room_blocks=blocks - 1), worker("d1", room_blocks=3)), ())
    assert place(demand, full, random.Random(0)) == Wait("decode workers are full", "d0")
    assert chosen(demand, [worker("d0", room_blocks=blocks)], []).decode.address == "d0"


def test_what_no_live_worker_could_ever_take_waits_for_none() -> None:
    nowhere = Snapshot((worker("d0", num_blocks=68, room_blocks=68),), ())
    result = place(LONG, nowhere, random.Random(0))
    assert isinstance(result, Wait)
    assert result.hopeless
    pinned = place(replace(LONG, fingerprint=b"old weights"), Snapshot((worker("d0"),), ()), random.Random(0))
    assert isinstance(pinned, Wait)
    assert pinned.hopeless
    assert place(LONG, Snapshot((), ()), random.Random(0)) == Wait("no decode worker is ready", hopeless=True)


def test_prefill_workers_that_refuse_get_no_work_for_a_while() -> None:
    busy = [worker("p0", cooling=True), worker("p1", cooling=True)]
    waits = place(LONG, Snapshot((worker("d0"),), tuple(busy)), random.Random(0))
    assert waits == Wait("prefill workers are busy")
    assert chosen(SHORT, [worker("d0")], busy).local
    assert chosen(replace(LONG, force_local=True), [worker("d0")], busy).local
    turned_away = replace(LONG, avoid=frozenset({worker("p1").epoch}))
    ranked = chosen(turned_away, [worker("d0")], [worker("p1"), worker("p2", queued_tokens=50)]).prefill
    assert [p.name for p in ranked] == ["p2", "p1"]


def test_a_failed_worker_is_avoided_where_another_has_room() -> None:
    d0, d1 = worker("d0"), worker("d1", active=99)
    demand = replace(LONG, avoid=frozenset({d0.epoch}))
    assert chosen(demand, [d0, d1], []).decode.address == "d1"
    assert chosen(demand, [d0, replace(d1, room_blocks=0)], []).decode.address == "d0"


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (replace(SHAPE, protocol=2), "protocol (2 and 1)"),
        (replace(SHAPE, layout=(2, 2, 8, 16, "bfloat16")), "layout ((2, 2, 8, 16, 'bfloat16') and"),
        (OTHER, f"fingerprint ({b'other weights'.hex()[:12]} and {b'weights'.hex()[:12]})"),
    ],
)
def test_a_mismatch_is_named(shape: Shape, text: str) -> None:
    result = place(LONG, Snapshot((worker("d0"),), (worker("p0", shape=shape),)), random.Random(0))
    assert isinstance(result, NoPair)
    assert result.reason.startswith(f"prefill p0 and decode d0 differ in {text}")
    assert difference(SHAPE, SHAPE) == "nothing"


def test_equal_workers_are_drawn_at_random() -> None:
    decode, prefill = [worker(f"d{i}") for i in range(4)], [worker(f"p{i}") for i in range(4)]
    results = [chosen(LONG, decode, prefill, seed) for seed in range(400)]
    for counts in (Counter(r.decode.address for r in results), Counter(r.prefill[0].address for r in results)):
        assert min(counts.values()) > 60


def test_a_hot_prefix_does_not_pull_everything_to_one_worker() -> None:
    """P01: 4 prefill workers, one has the system prompt; every placement queues its tokens there."""
    queued = dict.fromkeys((f"p{i}" for i in range(4)), 0)
    for seed in range(100):
        prefill = [worker(n, queued_tokens=q, cached_tokens=800 if n == "p0" else 0) for n, q in queued.items()]
        first = chosen(LONG, [worker("d0")], prefill, seed).prefill[0]
        queued[first.address] += 1000 - first.cached_tokens
    assert max(queued.values()) <= 1.5 * sum(queued.values()) / 4
