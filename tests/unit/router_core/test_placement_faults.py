"""Placement among many requests, on the modelled cluster (benchmarks/modelled): FAULTS P01, P03, P04, P08."""

import statistics
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.modelled.cluster import NODE, Shape
from benchmarks.modelled.player import Outcome, Player
from benchmarks.modelled.traces import BLOCK, Ask
from cluster.core.config import RouterSettings
from cluster.stubs import session_pb2 as pb
from tests.unit.router_core.fakes import request
from tests.unit.router_core.test_router_placement import LONG, chosen, worker
from tests.unit.router_core.world import submits, world


def play(asks: list[Ask], shape: Shape, policy: str = "cost") -> list[Outcome]:
    outcomes = Player(asks, shape, RouterSettings.model_validate({"policy": policy, "queue_limit": 1000}), 1).play()
    assert all(outcome.good for outcome in outcomes)
    return outcomes


def prompts(count: int, every_s: float, blocks: int, *, shared: int = 0, output: int = 20) -> list[Ask]:
    own = [range(1000 * i, 1000 * i + blocks - shared) for i in range(1, count + 1)]
    return [Ask(every_s * i, (*range(shared), *ids), blocks * BLOCK, output) for i, ids in enumerate(own)]


def mean_ttft(outcomes: list[Outcome]) -> float:
    return statistics.fmean(o.ttft for o in outcomes if o.ttft is not None)


def test_a_hot_prefix_is_spread_when_its_worker_is_busy() -> None:
    """P01: 8 prefill workers, one system prompt for all, as much work as five of them can do."""
    asks = prompts(240, 0.025, 10, shared=4)
    outcomes = play(asks, Shape(prefill=8, decode=8))
    late = outcomes[40:]
    busy = Counter(o.trace.prefill_worker for o in late if o.trace.prefill_worker != "local")
    assert len(busy) == 8
    assert max(busy.values()) <= 1.5 * sum(busy.values()) / 8
    cached = statistics.fmean(o.trace.cached_tokens for o in late)
    assert cached >= 0.9 * 4 * BLOCK


def test_a_prefix_that_all_share_ruins_a_policy_that_knows_no_price_of_waiting() -> None:
    """The other side of P01: what `cost` is there for."""
    first, *rest = prompts(120, 0.025, 10, shared=6)
    asks = [first, *(replace(ask, at=ask.at + 1) for ask in rest)]
    by_cost, by_prefix = (mean_ttft(play(asks, Shape(prefill=8, decode=8), policy)) for policy in ("cost", "prefix"))
    assert by_cost * 3 < by_prefix


def test_routers_that_see_the_same_do_not_all_choose_the_same() -> None:
    """P03: four routers, 64 requests at once; nobody has heard of the others' choices."""
    outcomes = play(prompts(64, 0.0, 30), Shape(prefill=8, decode=8, routers=4))
    for name in ("prefill_worker", "decode_worker"):
        shares = Counter(getattr(o.trace, name) for o in outcomes)
        shares.pop("local", None)
        assert max(shares.values()) <= 2 * 64 / 8


def test_a_worker_with_a_full_queue_and_an_empty_cache_attracts_no_misses() -> None:
    """P03: having the least in its cache is no merit."""
    prefill = [worker("p0", queue=(900, 900)), *(worker(f"p{i}", queue=(300,), num_blocks=128) for i in range(1, 4))]
    for seed in range(20):
        result = chosen("cost", LONG, [worker("d0", active=9, queue=(9000,))], prefill, seed)
        assert result.prefill[0].name != "p0"


def test_streams_that_run_on_keep_their_load_on_their_worker() -> None:
    """P03: 20 long streams on one decode worker; what is new goes to the other, also after the headers are out."""
    made = world(prefill=1, decode=2)
    made.workers["d1:1"].draining = True
    made.heartbeat()
    for number in range(3):
        made.ask(request(f"long{number}", max_tokens=40))
    made.deliver()
    made.workers["d1:1"].draining = False
    made.heartbeat()
    for number in range(3):
        made.ask(request(f"new{number}", max_tokens=4))
    assert [s.attempt.startswith("new") for s in submits(made.workers["d1:1"])] == [True] * 3


def test_the_first_token_goes_out_before_the_last_block_is_here() -> None:
    """P04: the router waits for neither leg."""
    made = world(prefill=1, decode=1)
    client = made.ask(request("r", prompt=tuple(range(100)), max_tokens=20))
    run = pb.TokenRun(attempt="r.1", index=0, offset=0, ids=[7])
    made.apply(made.core.on_session("d0:1", pb.FromDecode(tokens=pb.Tokens(runs=[run])), made.now))
    assert client.ids == [[7]]
    assert "transfer" not in client.trace.timings_ms


def test_split_serving_adds_no_more_than_its_messages_to_the_first_token() -> None:
    """P04: 4,096 positions at low load, read by a prefill worker or by the decode worker that writes."""
    asks = prompts(6, 5.0, 8)
    split, whole = (play(asks, Shape(prefill=prefill, decode=1)) for prefill in (1, 0))
    assert {o.trace.prefill_worker for o in split} == {"p0"}
    assert mean_ttft(split) - mean_ttft(whole) <= NODE.move_s(8 * BLOCK) + 0.02


@pytest.mark.parametrize(("prefill", "decode", "least", "most"), [(1, 3, 0.3, 0.8), (2, 2, 0.0, 0.5), (3, 1, 0.0, 0.1)])
def test_a_pool_that_is_behind_is_helped_by_the_other(prefill: int, decode: int, least: float, most: float) -> None:
    """P08: whatever the ratio, prompts are read where there is time; a fixed split leaves one pool idle."""
    asks = prompts(120, 0.2, 16, output=60)
    outcomes = play(asks, Shape(prefill=prefill, decode=decode))
    local = statistics.fmean(o.trace.prefill_worker == "local" for o in outcomes)
    assert least <= local <= most
    if prefill == 1:
        fixed = play(asks, Shape(prefill=prefill, decode=decode), "least_loaded")
        assert mean_ttft(outcomes) * 2 < mean_ttft(fixed)
