"""Placement as tables: who may serve a request, whatever the policy, and whom each policy chooses."""

import random
from dataclasses import replace

import pytest

from cluster.core.kv_dtypes import ITEM_BYTES
from engine.layout import KVLayout
from router.placement import (
    POLICIES,
    Demand,
    NoPair,
    Placement,
    Rates,
    Shape,
    Snapshot,
    Wait,
    WorkerLoad,
    difference,
)

SHAPE = Shape(1, (2, 2, 8, 16, "float32"), b"weights")
OTHER = replace(SHAPE, fingerprint=b"other weights")
BASE = WorkerLoad("", "", 0, SHAPE, max_context=4096, num_blocks=256, room_blocks=256)
LONG = Demand(prompt_tokens=1000, histories=(0,), max_tokens=100, local_max_tokens=64)
SHORT = replace(LONG, prompt_tokens=50)
Loads = list[WorkerLoad]
ALL = pytest.mark.parametrize("policy", POLICIES)


def worker(name: str, **changes: object) -> WorkerLoad:
    return replace(BASE, address=name, name=name, epoch=sum(name.encode()), **changes)  # type: ignore[arg-type]


def ask(policy: str, demand: Demand, decode: Loads, prefill: Loads, seed: int = 0) -> Placement | Wait | NoPair:
    return POLICIES[policy]().place(demand, Snapshot(tuple(decode), tuple(prefill)), random.Random(seed))


def chosen(policy: str, demand: Demand, decode: Loads, prefill: Loads, seed: int = 0) -> Placement:
    result = ask(policy, demand, decode, prefill, seed)
    assert isinstance(result, Placement), result
    return result


# ---- the same for every policy


@ALL
def test_a_decode_worker_that_converts_is_placed_with_its_sources_alone(policy: str) -> None:
    source = replace(SHAPE, fingerprint=b"as computed")
    shape = Shape(1, (2, 2, 8, 16, "int8"), b"int8", (("float32", b"as computed"),))
    result = chosen(policy, LONG, [worker("d0", shape=shape)], [worker("p0"), worker("p1", shape=source)])
    assert [p.address for p in result.prefill] == ["p1"]
    wrong = ask(policy, LONG, [worker("d0", shape=shape)], [worker("p0")])
    assert isinstance(wrong, NoPair)
    assert "fingerprint" in wrong.reason
    narrow = replace(SHAPE, layout=(*SHAPE.layout[:4], "bfloat16"))
    other = ask(policy, LONG, [worker("d0", shape=shape)], [worker("p0", shape=narrow)])
    assert isinstance(other, NoPair)
    assert "layout" in other.reason


def test_scales_and_conversion_count_in_what_travels() -> None:
    shape = Shape(1, (2, 2, 8, 16, "int8"), b"int8", (("float32", b"as computed"),))
    assert (shape.kv_bytes, shape.moved_bytes) == (2 * 2 * 2 * (8 + 4), 2 * 2 * 2 * 8 * 4)
    assert replace(shape, sources=()).moved_bytes == shape.kv_bytes


@ALL
@pytest.mark.parametrize(
    ("d0", "d1", "winner"),
    [
        ({"room_blocks": 10}, {"active": 9}, "d1"),
        ({"cooling": True}, {"active": 9}, "d1"),
        ({"max_context": 1000}, {"active": 9}, "d1"),
        ({"num_blocks": 60, "room_blocks": 60}, {"active": 9}, "d1"),
        ({"shape": OTHER}, {"active": 9}, "d1"),
    ],
)
def test_who_may_serve_it(policy: str, d0: dict[str, object], d1: dict[str, object], winner: str) -> None:
    result = chosen(policy, LONG, [worker("d0", **d0), worker("d1", **d1)], [worker("p0")])
    assert result.decode.address == winner


@ALL
def test_at_most_three_prefill_workers_and_only_fitting_ones(policy: str) -> None:
    prefill = [worker(f"p{i}") for i in range(5)] + [worker("odd", shape=OTHER), worker("small", num_blocks=10)]
    result = chosen(policy, LONG, [worker("d0", active=5)], prefill)
    assert len(result.prefill) == 3
    assert not {p.address for p in result.prefill} & {"odd", "small"}


@ALL
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
def test_who_reads_the_prompt(
    policy: str, demand: Demand, cached: int, prefill: bool, local: bool, listed: int
) -> None:
    decode = worker("d0", cached_tokens=cached, active=9)
    result = chosen(policy, demand, [decode], [worker("p0")] if prefill else [])
    assert (result.local, len(result.prefill)) == (local, listed)
    assert (result.local_max_tokens >= decode.missing(demand.tokens)) == local


@ALL
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
def test_it_waits_until_there_is_room_for_prompt_history_and_growth(policy: str, demand: Demand, blocks: int) -> None:
    full = [worker("d0", room_blocks=blocks - 1), worker("d1", room_blocks=3)]
    assert ask(policy, demand, full, []) == Wait("decode workers are full", "d0")
    assert chosen(policy, demand, [worker("d0", room_blocks=blocks)], []).decode.address == "d0"


@ALL
def test_what_no_live_worker_could_ever_take_waits_for_none(policy: str) -> None:
    for demand, decode in (
        (LONG, worker("d0", num_blocks=68, room_blocks=68)),
        (replace(LONG, fingerprint=b"old weights"), worker("d0")),
    ):
        result = ask(policy, demand, [decode], [])
        assert isinstance(result, Wait)
        assert result.hopeless
    assert ask(policy, LONG, [], []) == Wait("no decode worker is ready", hopeless=True)


@ALL
def test_prefill_workers_that_refuse_get_no_work_for_a_while(policy: str) -> None:
    busy = [worker("p0", cooling=True), worker("p1", cooling=True)]
    streaming = worker("d0", active=9)
    assert ask(policy, LONG, [streaming], busy) == Wait("prefill workers are busy", "p0")
    assert chosen(policy, SHORT, [streaming], busy).local
    assert chosen(policy, replace(LONG, force_local=True), [streaming], busy).local
    assert chosen(policy, LONG, [streaming], [*busy, worker("p2", queue=(900,))]).prefill[0].name == "p2"


@ALL
def test_a_prompt_that_turned_away_goes_elsewhere(policy: str) -> None:
    demand = replace(LONG, avoid=frozenset({worker("p1").epoch}))
    decode = [worker("d0", active=9)]
    ranked = chosen(policy, demand, decode, [worker("p1"), worker("p2", queue=(50,))]).prefill
    assert [p.name for p in ranked] == ["p2"]
    assert [p.name for p in chosen(policy, demand, decode, [worker("p1")]).prefill] == ["p1"]


@ALL
def test_a_prompt_beyond_the_window_of_a_prefill_worker_waits_in_the_router(policy: str) -> None:
    full = worker("p0", queue=(3500,), window_tokens=4096)
    streaming = worker("d0", active=9, queue=(4000,))
    assert ask(policy, LONG, [streaming], [full]) == Wait("prefill workers are busy", "p0")
    for roomy in (
        replace(full, queue=()),
        replace(full, cached_tokens=960),
        replace(full, queue=(3000,)),
        replace(full, window_tokens=0),
    ):
        assert chosen(policy, LONG, [streaming], [roomy]).prefill == (roomy,)


@ALL
def test_a_decode_worker_that_converts_waits_for_busy_prefill_workers_like_any_other(policy: str) -> None:
    full = worker("p0", queue=(3500,), window_tokens=4096)
    converting = replace(SHAPE, sources=((OTHER.layout[4], OTHER.fingerprint),))
    decode = worker("d0", shape=converting, active=9, queue=(4000,))
    for busy in ([full], [replace(full, shape=OTHER)]):
        assert ask(policy, LONG, [decode], busy) == Wait("prefill workers are busy", "p0")


@ALL
def test_a_failed_worker_is_avoided_where_another_has_room(policy: str) -> None:
    d0, d1 = worker("d0"), worker("d1", active=99)
    demand = replace(LONG, avoid=frozenset({d0.epoch}))
    assert chosen(policy, demand, [d0, d1], []).decode.address == "d1"
    assert chosen(policy, demand, [d0, replace(d1, room_blocks=0)], []).decode.address == "d0"


@ALL
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (replace(SHAPE, protocol=2), "protocol (2 and 1)"),
        (replace(SHAPE, layout=(2, 2, 8, 16, "bfloat16")), "layout ((2, 2, 8, 16, 'bfloat16') and"),
        (OTHER, f"fingerprint ({b'other weights'.hex()[:12]} and {b'weights'.hex()[:12]})"),
    ],
)
def test_a_mismatch_is_named(policy: str, shape: Shape, text: str) -> None:
    result = ask(policy, LONG, [worker("d0")], [worker("p0", shape=shape)])
    assert isinstance(result, NoPair)
    assert result.reason.startswith(f"prefill p0 and decode d0 differ in {text}")
    assert difference(SHAPE, SHAPE) == "nothing"


# ---- one by one


def test_the_kv_of_a_position_is_as_large_as_workers_make_it() -> None:
    """Whatever its type, the tracer's included: what is to be moved is a term of the cost."""
    for dtype in ITEM_BYTES:
        moved = KVLayout(layers=3, kv_heads=2, head_dim=16, block_size=16, dtype=dtype).block_bytes
        assert replace(SHAPE, layout=(3, 2, 16, 16, dtype)).kv_bytes == moved / 16


def test_round_robin_takes_everybody_in_turn_whoever_comes_or_goes() -> None:
    policy, rng = POLICIES["round_robin"](), random.Random(0)
    decode, prefill = [worker("d0", active=50), worker("d1")], [worker(f"p{i}", queue=(100 * i,)) for i in range(3)]

    def turn(prefill: list[WorkerLoad]) -> tuple[str, str]:
        result = policy.place(LONG, Snapshot(tuple(decode), tuple(prefill)), rng)
        assert isinstance(result, Placement)
        return result.decode.name, result.prefill[0].name

    assert [turn(prefill) for _ in range(4)] == [("d0", "p0"), ("d1", "p1"), ("d0", "p2"), ("d1", "p0")]
    assert turn([prefill[0], prefill[2]]) == ("d0", "p2")
    assert turn(prefill) == ("d1", "p0")


def test_least_loaded_counts_positions_and_streams_alone() -> None:
    decode = [worker("d0", active=3, cached_tokens=800), worker("d1", active=2)]
    prefill = [worker("p0", queue=(10, 10), cached_tokens=800), worker("p1", queue=(19,))]
    result = chosen("least_loaded", LONG, decode, prefill)
    assert (result.decode.name, result.prefill[0].name) == ("d1", "p1")


@pytest.mark.parametrize(("cached", "first"), [(400, "p1"), (640, "p0")])
def test_prefix_follows_a_long_match_whatever_waits_there(cached: int, first: str) -> None:
    prefill = [worker("p0", queue=(9000,), cached_tokens=cached), worker("p1", queue=(10,), cached_tokens=320)]
    assert chosen("prefix", LONG, [worker("d0", active=9)], prefill).prefill[0].name == first


def test_every_policy_says_what_its_choice_costs() -> None:
    rates = Rates(prefill=((4096, 2000.0),))
    decode, prefill = worker("d0", active=9), worker("p0", cached_tokens=200, queue=(100,), rates=rates)
    for policy in POLICIES:
        result = chosen(policy, LONG, [decode], [prefill])
        first = result.considered[0]
        assert (first.decode, first.prefill) == ("d0", "p0")
        assert (first.terms_ms["queue"], first.terms_ms["compute"]) == (50.0 + 64.0, 400.0)
        assert sum(first.terms_ms.values()) == result.estimate_ms
