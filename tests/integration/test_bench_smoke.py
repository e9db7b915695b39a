"""The benchmark end to end on the tracer, a few requests: what is counted is right. No figure of time is judged."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench import Bench, Plan
from benchmarks.overhead import measure_overhead
from benchmarks.report import document, markdown, write
from benchmarks.seen import SETUPS
from benchmarks.workloads import Profile, Workload
from cluster.core.clock import SystemClock
from tests.architecture.source import ROOT

PROMPT, LONG, BLOCK = 100, 600, 16
CLOSED = Workload("concurrent", PROMPT, 12, concurrency=3, count=5)
MIXED = Workload(
    "interference", PROMPT, 8, duration_s=0.5, rate=10.0, long_rate=2.0, long_prompt_tokens=LONG, long_output_tokens=4
)
PLAN = Plan(Profile("smoke", (1,), 1, (CLOSED, MIXED), 0), "tracer", ["router.policy=least_loaded"], overhead=False)


@pytest.mark.verify
async def test_both_set_ups_serve_the_same_requests(tmp_path: Path) -> None:
    outcome = await Bench(PLAN, SystemClock()).run()
    figures = {(run.workload, run.setup): run.figures for run in outcome.runs}
    assert set(figures) == {(w.name, s) for w in (CLOSED, MIXED) for s in ("split", "aggregated")}
    assert [error for run in outcome.runs for error in run.errors] == []
    for workload in (CLOSED, MIXED):
        split, aggregated = figures[workload.name, "split"], figures[workload.name, "aggregated"]
        assert split["requests"] == aggregated["requests"]
        assert split["prompt_tokens"] == aggregated["prompt_tokens"] == PROMPT
        assert (
            split["handoffs"] == split["requests"]
        )  # the policy never leaves a prompt to decode that is longer than local_max_tokens
        assert aggregated["handoffs"] == 0
        assert split["exposed_p50"] is not None
    block_mb = 2 * 2 * 2 * BLOCK * 2 * 8 / 1e6  # layers, kv heads, K and V, positions, head_dim, int64
    assert figures["concurrent", "split"]["requests"] == CLOSED.count
    assert figures["concurrent", "split"]["kv_mb"] == pytest.approx(PROMPT // BLOCK * block_mb)
    assert {"client", "split/prefill-0 engine", "aggregated/decode-1 server"} <= set(outcome.runs[0].cpu)
    paths = write(tmp_path, "smoke", markdown(PLAN, outcome, {}), document(PLAN, outcome, {}))
    assert [path.suffix for path in paths] == [".md", ".json"]
    assert "## interference" in paths[0].read_text()


async def test_the_router_alone() -> None:
    figures = await measure_overhead("tracer", 25, SystemClock())
    assert figures["load_failed"] == 0
    ways = {f"{way}_{tokens}_p50" for way in ("direct", "http", "grpc") for tokens in (1, 32)}
    assert ways | {"http_per_request", "grpc_per_token", "load_requests_s"} <= set(figures)


@pytest.mark.verify
async def test_what_it_costs_to_be_seen_is_measured_on_routers_that_count_and_one_that_does_not(tmp_path: Path) -> None:
    code = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "benchmarks.seen", "--model=tracer", "--rounds=1", "--requests=64", f"--out={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert code.returncode == 0, code.stderr
    (page,) = tmp_path.glob("*-seen-at-once.md")
    assert all(f"\n| {name} | " in page.read_text() for name in SETUPS)
