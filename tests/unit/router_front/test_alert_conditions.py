"""When alerts fire that compare what is there with what is wanted: over the samples of a moment."""

import pytest

from tests.promql import Samples, answer
from tests.queries import rules

CONDITIONS = {rule["alert"]: rule["expr"] for rule in rules()}


def moment(ready: dict[str, int], wanted: dict[str, int] | None, *, local_share: float = 0.0) -> Samples:
    """As two routers tell it: of each pool, all told of workers and of what is wanted."""
    for router in ("a", "b"):
        for pool, count in ready.items():
            labels = {"instance": router, "pool": pool}
            yield "headrace_workers", {**labels, "state": "ready"}, count
            yield "headrace_workers", {**labels, "state": "starting"}, 7
        for pool, count in (wanted or {}).items():
            yield "headrace_desired_programs", {"instance": router, "pool": pool}, count
        yield "headrace_dispatched_total", {"instance": router, "outcome": "ok"}, 50.0
        told = {"instance": router, "pool": "decode", "worker": "decode-0"}
        yield "headrace_worker_local_prefills_total", {**told, "reason": "short prompt"}, 40.0
        yield "headrace_worker_local_prefills_total", {**told, "reason": "no prefill worker"}, local_share * 100


@pytest.mark.parametrize(
    ("ready", "wanted", "fires"),
    [
        (0, 1, True),
        (0, None, True),  # workers of `seeds`, or a controller that has not told yet: nobody knows that none is wanted
        (1, 2, False),
        (0, 0, False),  # decode alone, where prompts are prefilled too
        (1, None, False),
    ],
)
def test_no_prefill_worker(ready: int, wanted: int | None, fires: bool) -> None:
    told = None if wanted is None else {"prefill": wanted, "decode": 1, "router": 2}
    samples = moment({"prefill": ready, "decode": 1, "unknown": 0}, told)
    assert bool(answer(CONDITIONS["HeadraceNoPrefillWorker"], samples)) is fires


@pytest.mark.parametrize(
    ("wanted", "share", "fires"), [(1, 0.2, True), (None, 0.2, True), (0, 1.0, False), (1, 0, False)]
)
def test_prefill_short(wanted: int | None, share: float, fires: bool) -> None:
    told = None if wanted is None else {"prefill": wanted}
    samples = moment({"prefill": 1, "decode": 1}, told, local_share=share)
    assert bool(answer(CONDITIONS["HeadracePrefillShort"], samples)) is fires


def test_fewer_than_desired_names_the_pool() -> None:
    def pools(ready: dict[str, int], wanted: dict[str, int] | None) -> list[str]:
        found = answer(CONDITIONS["HeadraceFewerThanDesired"], moment({**ready, "unknown": 0}, wanted))
        return sorted(dict(labels)["pool"] for labels in found)

    assert pools({"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 2, "router": 9}) == ["prefill"]
    assert pools({"prefill": 0, "decode": 0}, {"prefill": 1, "decode": 1}) == ["decode", "prefill"]
    assert pools({"prefill": 0, "decode": 1}, {"prefill": 0, "decode": 1}) == []
    assert pools({"prefill": 3, "decode": 1}, {"prefill": 1, "decode": 1}) == [], "while some leave"
    assert pools({"prefill": 0, "decode": 0}, None) == []
