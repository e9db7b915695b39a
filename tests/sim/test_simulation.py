"""Seeds: each is a world of its own, and every invariant must hold in it (DESIGN §5; issue "hand-off", `headrace sim`).

A seed that fails is replayed with `headrace sim --seed N --trace`; when its cause is mended it gets a file in
regressions/ and the cause a unit test of its own, since a seed means another world as soon as the simulation changes.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulation.run import simulate
from simulation.scenario import CROWD, FAULTS
from tests.sim.conftest import BATCH, Play

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEDS = 300
VERIFIED = 10_000
REGRESSIONS = sorted((HERE / "regressions").glob("*.json"))

seen: Counter[str] = Counter()
usual: Counter[str] = Counter()  # outcomes, but for worlds that are crowded so that much is refused


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_invariant_holds(play: Play, seed: int) -> None:
    verdict = play(seed)
    for kind in (verdict.faults, verdict.outcomes, verdict.counters):
        seen.update(kind)
    if verdict.scenario.requests < CROWD:
        usual.update(verdict.outcomes)
    assert not verdict.violation, verdict.line()


def test_the_seeds_together_met_every_fault_and_successes_dominate() -> None:
    if not seen:
        pytest.skip("the seeds did not run")
    missing = [kind for kind in FAULTS if not seen[kind]]
    assert not missing, f"no seed met {missing}"
    rules = ("a grammar", "penalties", "bias", "min_p", "min_tokens", "prompt_logprobs", "max_tokens 0")
    story = [f"{what} under {rule}" for what in ("answers", "failovers") for rule in rules]
    ends = [f"kv_blocks_{end}" for end in ("reread", "corrupt", "recomputed", "refused", "abandoned")]
    met = ("digest_mismatch", "prefix_hit_corrupt", "read_given_up", "preempted", "workers_silent", "handoffs")
    limits = ("RateLimited", "killed in a hunt", "several failovers")
    for what in (*met, *ends, *story, *limits):
        assert seen[what], f"no seed met {what}"
    honest = ("Overloaded", "Unavailable", "DeadlineExceeded", "RequestFailed", "BrokenOff", "QuotasUnavailable")
    failed = sum(usual[name] for name in honest)
    assert usual["ok"] > 10 * failed, f"{usual['ok']} successes, {failed} honest failures"


@pytest.mark.parametrize("file", REGRESSIONS, ids=lambda file: file.stem)
def test_what_failed_once(file: Path) -> None:
    verdict = simulate(json.loads(file.read_text())["seed"])
    assert not verdict.violation, verdict.line()


@pytest.mark.verify
@pytest.mark.parametrize("first", range(SEEDS, VERIFIED, BATCH))
def test_many_more_seeds(play: Play, first: int) -> None:
    failed = [verdict.line() for seed in range(first, first + BATCH) if (verdict := play(seed)).violation]
    assert not failed, "\n".join(failed)


def test_a_seed_replays_word_by_word_in_another_process() -> None:
    seed = 4
    here: list[str] = []
    simulate(seed, trace=here.append)
    script = f"from simulation.run import simulate; simulate({seed}, trace=print)"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == here
    assert len(here) > 100


def test_a_world_without_faults_serves_everybody() -> None:
    for seed in range(5):
        verdict = simulate(seed, faults=False)
        assert not verdict.violation, verdict.line()
        assert not verdict.faults
        assert not set(verdict.outcomes) & {"Unavailable", "RequestFailed", "BrokenOff", "reset"}
