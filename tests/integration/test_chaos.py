"""`headrace chaos`: processes die and freeze under load, and every invariant holds. The long runs are `make verify`."""

from pathlib import Path

import pytest

from chaos.report import Report
from chaos.run import run_chaos
from chaos.settings import ChaosSettings


def check(settings: ChaosSettings, folder: Path, *, faults: int, answers: int) -> Report:
    report = run_chaos(settings, folder, lambda _: None)
    assert report.ok, "\n".join(report.lines())
    assert report.faults.total() >= faults, report.faults
    assert report.tally.outcomes["ok"] >= answers, report.tally.outcomes
    assert report.tally.failovers, "no answer ever took more than one attempt"
    for what in ("handoffs", "kv_blocks_verified"):
        assert report.workers[what], report.workers
    return report


@pytest.mark.verify
def test_a_short_run(tmp_path: Path) -> None:
    check(ChaosSettings(seconds=20.0, seed=7, rest_s=0.5), tmp_path, faults=5, answers=50)


@pytest.mark.verify
def test_three_minutes(tmp_path: Path) -> None:
    report = check(ChaosSettings(seconds=180.0, seed=11), tmp_path, faults=40, answers=600)
    for role in ("prefill", "decode", "router"):
        assert [fault for fault in report.faults if fault.startswith(role)], report.faults


@pytest.mark.verify
def test_two_minutes_over_tcp(tmp_path: Path) -> None:
    check(ChaosSettings(seconds=120.0, seed=12, tcp=True), tmp_path, faults=20, answers=300)
