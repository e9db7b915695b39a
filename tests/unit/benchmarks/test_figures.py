"""Figures of a run, and medians over runs."""

import pytest

from benchmarks.figures import Spread, run_figures, spread, spreads
from benchmarks.timeline import Handoff, Slo, Timeline


def chat(sent: float, handoff: Handoff | None = None) -> Timeline:
    """Three tokens, 100 ms after sending and then 50 ms apart."""
    return Timeline("chat", sent, (sent + 0.1, sent + 0.15, sent + 0.2), 20, 3, handoff=handoff)


def test_a_run() -> None:
    timelines = [chat(0.0), chat(1.0), chat(1.05), Timeline("chat", 2.0, (), error="HTTP 503")]
    timelines.append(Timeline("long", 2.0, (5.0, 5.2), 3000, 2))
    figures = run_figures(timelines, [0.0, 0.002], Slo(ttft=0.2, tpot=0.06))
    assert (figures["requests"], figures["failed"]) == (5, 1)
    assert figures["ttft_p50"] == pytest.approx(100)
    assert figures["ttst_p99"] == pytest.approx(150)
    assert figures["itl_p50"] == pytest.approx(50)
    assert figures["itl_max"] == pytest.approx(50)
    assert figures["tpot_p50"] == pytest.approx(50)
    assert figures["output_tok_s"] == pytest.approx((9 + 2) / 5.2)
    assert figures["attainment"] == pytest.approx(3 / 4)  # of the chats; the failed one counts as bad
    assert figures["goodput"] == pytest.approx(3 / 5.2)
    assert figures["long_ttft_p50"] == pytest.approx(3000)
    assert figures["client_lag_p99"] == pytest.approx(1.98)
    assert figures["prompt_tokens"] == 20
    assert figures["chunks_per_token"] == 1
    assert figures["handoffs"] == 0
    assert figures["kv_mb"] is None


def test_gaps_beside_another_prompt_are_told_apart() -> None:
    figures = run_figures([chat(0.0), chat(0.12)], [], Slo())
    # the second one's prompt takes 0.12 .. 0.27: both gaps of the first fall in it, none of its own
    assert figures["itl_during_p50"] == pytest.approx(50)
    assert figures["itl_quiet_p50"] == pytest.approx(50)
    alone = run_figures([chat(0.0), chat(1.0)], [], Slo())
    assert alone["itl_during_p50"] is None


def test_handoffs_add_up() -> None:
    first = Handoff(2_000_000, offer_wait=0.01, wire=0.002, verify=0.004, exposed=0.003, prefill=0.1)
    second = Handoff(4_000_000, offer_wait=0.03, wire=0.004, verify=0.008, exposed=0.005, prefill=0.1)
    figures = run_figures([chat(0.0, first), chat(1.0, second), chat(2.0)], [], Slo())
    assert figures["handoffs"] == 2
    assert figures["kv_mb"] == pytest.approx(3)
    assert figures["verify_ms_per_mb"] == pytest.approx(12 / 6)
    assert figures["wire_mb_s"] == pytest.approx(6 / 0.006)
    assert figures["exposed_p50"] == pytest.approx(4)
    assert figures["offer_wait_p50"] == pytest.approx(20)


def test_nothing_came_through() -> None:
    figures = run_figures([Timeline("chat", 0.0, (), error="HTTP 503")], [], Slo())
    assert figures["attainment"] == 0
    assert figures["ttft_p50"] is None
    assert figures["output_tok_s"] is None


def test_spread_over_runs() -> None:
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([None, None]) is None
    assert spreads([{"a": 1.0, "b": None}, {"a": 2.0, "c": 4.0}]) == {"a": Spread(1.5, 1.0, 2.0), "c": Spread(4, 4, 4)}
