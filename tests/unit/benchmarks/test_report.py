"""The table says what was measured, and only that."""

import orjson
import pytest

from benchmarks.bench import Outcome, Plan, Run
from benchmarks.figures import Figures, Spread
from benchmarks.report import document, markdown, number, show
from benchmarks.workloads import Profile, Workload

LOAD = Workload("concurrent", 512, 64, concurrency=8, count=16)
PLAN = Plan(Profile("default", (1,), 2, (LOAD,), 10), "tracer")


def run(setup: str, repetition: int, ttft: float, **more: float) -> Run:
    figures: Figures = {
        "requests": 16.0,
        "failed": 0.0,
        "ttft_p50": ttft,
        "output_tok_s": 50.0,
        "handoffs": 0.0,
        **more,
    }
    cpu = {"client": 0.01, "split/router-0": 0.1, "aggregated/router-0": 0.2}
    return Run("concurrent", setup, 1, repetition, 9.0, figures, cpu, [])


def table_row(text: str, label: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {label}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_spread_and_ratio() -> None:
    outcome = Outcome(
        [
            run("split", 0, 100.0, handoffs=16.0, kv_mb=11.4),
            run("split", 1, 300.0, handoffs=16.0, kv_mb=11.4),
            run("aggregated", 0, 400.0),
            run("aggregated", 1, 400.0),
        ]
    )
    text = markdown(PLAN, outcome, {"processor": "a fast one"})
    assert table_row(text, "TTFT p50, ms") == ["TTFT p50, ms", "200 (100 - 300)", "400", "0.50"]
    assert table_row(text, "KV moved per hand-off")[1] == "11.4"
    assert table_row(text, "requests")[1:3] == ["16, 0 failed", "16, 0 failed"]
    assert "- processor: a fast one" in text
    assert "TTST p50" not in text  # nobody measured it
    assert "Router overhead" not in text
    assert table_row(text, "split |")[1] == "router-0 10; client 1; the idle set-up 20"


def test_json_holds_every_run() -> None:
    outcome = Outcome([run("split", 0, 100.0), run("aggregated", 0, 200.0)], {"http_per_request": 1.5})
    value = orjson.loads(orjson.dumps(document(PLAN, outcome, {"date": "today"})))
    assert [r["figures"]["ttft_p50"] for r in value["runs"]] == [100.0, 200.0]
    assert value["overhead"] == {"http_per_request": 1.5}
    assert value["machine"] == {"date": "today"}
    assert value["plan"]["slo"] == {"ttft": 2.0, "tpot": 0.08}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.4, "1,234"), (5.0, "5"), (0.0, "0")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_figure_that_never_varied_has_no_brackets() -> None:
    assert show(Spread(2.0, 2.0, 2.0)) == "2"
    assert show(None) == "-"
