"""From timelines to the figures of one run, and from several runs to median and spread. Pure. Times in milliseconds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timeline import Slo, Timeline, percentile, split_gaps

MS = 1000.0
MB = 1e6
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: which figure, how it is called, what is better (0: neither)."""

    key: str
    label: str
    better: int = -1


LATENCY_ROWS = (
    Row("requests", "requests (failed ones beside)", 0),
    Row("ttft_p50", "TTFT p50, ms"),
    Row("ttft_p99", "TTFT p99, ms"),
    Row("ttst_p50", "TTST p50, ms"),
    Row("ttst_p99", "TTST p99, ms"),
    Row("itl_p50", "ITL p50, ms"),
    Row("itl_p99", "ITL p99, ms"),
    Row("itl_max", "ITL max, ms"),
    Row("itl_during_p50", "ITL p50 while another prompt is read or handed off, ms"),
    Row("itl_during_p99", "ITL p99 while another prompt is read or handed off, ms"),
    Row("itl_quiet_p50", "ITL p50 otherwise, ms"),
    Row("itl_quiet_p99", "ITL p99 otherwise, ms"),
    Row("itl_transfer_p50", "ITL p50 while KV of another request moves, ms"),
    Row("itl_transfer_p99", "ITL p99 while KV of another request moves, ms"),
    Row("tpot_p50", "TPOT p50, ms"),
    Row("tpot_p99", "TPOT p99, ms"),
    Row("output_tok_s", "output tokens/s", 1),
    Row("attainment", "attainment of the SLO (chats)", 1),
    Row("goodput", "goodput (chats), requests/s", 1),
    Row("long_ttft_p50", "long prompts: TTFT p50, ms"),
    Row("long_tpot_p50", "long prompts: TPOT p50, ms"),
    Row("prompt_tokens", "prompt tokens, mean", 0),
    Row("chunks_per_token", "chunks per output token", 0),
    Row("client_lag_p99", "client: sent late by, p99, ms", 0),
)
HANDOFF_ROWS = (
    Row("handoffs", "hand-offs", 0),
    Row("kv_mb", "KV moved per hand-off, MB, mean", 0),
    Row("offer_wait_p50", "job sent -> first offer p50, ms"),
    Row("wire_p50", "wire p50, ms (its reads added up)"),
    Row("wire_mb_s", "wire, MB/s (all bytes / all read time)", 1),
    Row("verify_p50", "copy + verify p50, ms (asked -> done, with the wait for a running step)"),
    Row("verify_p99", "copy + verify p99, ms"),
    Row("verify_ms_per_mb", "copy + verify per MB, ms"),
    Row("exposed_p50", "exposed transfer p50, ms"),
    Row("exposed_p99", "exposed transfer p99, ms"),
)


def run_figures(timelines: Sequence[Timeline], lags: Sequence[float], slo: Slo, main: str = "chat") -> Figures:
    """Figures of one run. Latencies are those of the `main` kind, throughput and hand-offs of all requests."""
    every = [t for t in timelines if t.ok]
    chosen = [t for t in every if t.kind == main]
    longs = [t for t in every if t.kind != main]
    asked = [t for t in timelines if t.kind == main]
    span = _span(every)
    good = sum(slo.kept(t) for t in asked)
    figures: Figures = {
        "requests": float(len(timelines)),
        "failed": float(len(timelines) - len(every)),
        **_percentiles("ttft", [t.ttft for t in chosen]),
        **_percentiles("ttst", [t.ttst for t in chosen if t.ttst is not None]),
        **_percentiles("tpot", [t.tpot for t in chosen if t.tpot is not None]),
        **_itl(chosen, every),
        "output_tok_s": _ratio(sum(t.output_tokens for t in every), span),
        "attainment": _ratio(good, len(asked)),
        "goodput": _ratio(good, span),
        "prompt_tokens": _ratio(sum(t.prompt_tokens for t in chosen), len(chosen)),
        "chunks_per_token": _ratio(sum(len(t.chunks) for t in chosen), sum(t.output_tokens for t in chosen)),
        "client_lag_p99": _ms(percentile(lags, 99)),
        "long_ttft_p50": _ms(percentile([t.ttft for t in longs], 50)),
        "long_tpot_p50": _ms(percentile([t.tpot for t in longs if t.tpot is not None], 50)),
    }
    return figures | handoff_figures(every)


def handoff_figures(timelines: Sequence[Timeline]) -> Figures:
    """Figures of the hand-offs among these requests."""
    moved = [t.handoff for t in timelines if t.handoff is not None]
    megabytes = sum(h.kv_bytes for h in moved) / MB
    return {
        "handoffs": float(len(moved)),
        "kv_mb": _ratio(megabytes, len(moved)),
        "offer_wait_p50": _ms(percentile([h.offer_wait for h in moved], 50)),
        "wire_p50": _ms(percentile([h.wire for h in moved], 50)),
        "wire_mb_s": _ratio(megabytes, sum(h.wire for h in moved)),
        **_percentiles("verify", [h.verify for h in moved]),
        "verify_ms_per_mb": _ratio(sum(h.verify for h in moved) * MS, megabytes),
        **_percentiles("exposed", [h.exposed for h in moved]),
    }


def _itl(chosen: Sequence[Timeline], every: Sequence[Timeline]) -> Figures:
    gaps = [end - start for t in chosen for start, end in t.gaps]
    during, quiet = split_gaps(chosen, [(t, t.prompt_window()) for t in every])
    transfers = [(t, window) for t in every if (window := t.transfer_window()) is not None]
    moving, _ = split_gaps(chosen, transfers)
    return {
        **_percentiles("itl", gaps),
        "itl_max": _ms(max(gaps, default=None)),
        **_percentiles("itl_during", during),
        **_percentiles("itl_quiet", quiet),
        **_percentiles("itl_transfer", moving),
    }


def _span(timelines: Sequence[Timeline]) -> float:
    """First sent -> last token, in seconds."""
    if not timelines:
        return 0.0
    return max(t.chunks[-1] for t in timelines) - min(t.sent for t in timelines)


def _percentiles(name: str, seconds: Sequence[float]) -> Figures:
    return {f"{name}_p50": _ms(percentile(seconds, 50)), f"{name}_p99": _ms(percentile(seconds, 99))}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MS


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of a figure over runs."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """None when no run had the figure."""
    known = [value for value in values if value is not None]
    middle = percentile(known, 50)
    return None if middle is None else Spread(middle, min(known), max(known))


def spreads(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    """Every figure that some run had."""
    keys = dict.fromkeys(key for run in runs for key in run)
    found = ((key, spread([run.get(key) for run in runs])) for key in keys)
    return {key: value for key, value in found if value is not None}
