"""Outcome -> Markdown and JSON. Pure, but for `write` and `publish`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from benchmarks.bench import NAMES, Outcome, Plan, Run
from benchmarks.figures import HANDOFF_ROWS, LATENCY_ROWS, Row, Spread, spreads
from benchmarks.setups import SPLIT
from benchmarks.workloads import Workload

OVERHEAD_ROWS = (
    ("per_request", "added latency per request, ms"),
    ("per_token", "added latency per token, ms"),
    ("cpu_per_request", "router's processor time per request of one token, ms"),
    ("cpu_per_token", "router's processor time per further token, ms"),
)
NOTES = """\
Formulas (client side, MEASURE's names): TTFT sent -> first chunk with text; TTST sent -> second; ITL each gap between
consecutive chunks, pooled over the requests of a run; TPOT (last chunk - first) / (output tokens - 1); output tokens/s
over first sent -> last token; attainment = good / submitted, goodput = good / the same span. "While another prompt is
read or handed off": the gap overlaps the time from another request's sending to its second chunk, the same for both
set-ups (on the aggregated one that may be the other worker). "While KV of another request moves": it overlaps first
offer -> ready to decode of another request, placed on the client's clock by its first token.
Cells are the median over runs, least and greatest in brackets; percentiles are taken inside a run.
"""


def markdown(plan: Plan, outcome: Outcome, machine: Mapping[str, str]) -> str:
    """The whole table."""
    parts = [f"# Split against aggregated: {plan.model}, {plan.profile.name}", ""]
    parts += head(machine)
    parts.append(f"- pinning: {outcome.pinning}")
    parts.append(f"- settings beside the defaults: {', '.join(plan.settings) or 'none'}")
    parts.append(f"- SLO: TTFT <= {plan.slo.ttft:g} s and TPOT <= {plan.slo.tpot * 1000:g} ms")
    seeds = ", ".join(map(str, plan.profile.seeds))
    parts.append(f"- seeds {seeds}; {plan.profile.rounds} round(s) each, split and aggregated in turn")
    for workload in plan.profile.workloads:
        parts += _workload(workload, [run for run in outcome.runs if run.workload == workload.name])
    if outcome.overhead:
        parts += _overhead(outcome.overhead)
    return "\n".join([*parts, "", "## How to read this", "", NOTES])


def document(plan: Plan, outcome: Outcome, machine: Mapping[str, str]) -> dict[str, object]:
    """Every run's figures and samples."""
    return {"machine": dict(machine), "plan": asdict(plan), **asdict(outcome)}


def write(folder: Path, stem: str, text: str, figures: object) -> list[Path]:
    """Write the page and its figures (JSON-able); returns their paths."""
    data = orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.md", folder / f"{stem}.json"]
    paths[0].write_text(text, encoding="utf-8")
    paths[1].write_bytes(data + b"\n")
    return paths


def publish(folder: Path, stem: str, text: str, figures: object) -> None:
    """What every benchmark ends with: show the page, and leave it with its figures (JSON-able) in `folder`."""
    print(text)
    for path in write(folder, stem, text, figures):
        print(f"written: {path}")


def head(machine: Mapping[str, str]) -> list[str]:
    """The head of a page: where and when it was measured."""
    return [f"- {label}: {value}" for label, value in machine.items()]


def _workload(workload: Workload, runs: Sequence[Run]) -> list[str]:
    found = {name: spreads([run.figures for run in runs if run.setup == name]) for name in NAMES}
    lines = ["", f"## {workload.name}: {workload.describe()}", ""]
    lines += ["| | split (1 P + 1 D) | aggregated (2 workers) | split / aggregated |", "| --- | --- | --- | --- |"]
    for row in LATENCY_ROWS:
        split, aggregated = (found[name].get(row.key) for name in NAMES)
        if split is not None or aggregated is not None:
            cells = [*(_cell(row, found[name]) for name in NAMES), _ratio(row, split, aggregated)]
            lines.append(f"| {row.label} | {' | '.join(cells)} |")
    moved = found[SPLIT].get("handoffs")
    if moved is not None and moved.high > 0:
        lines += ["", "| hand-offs of the split | |", "| --- | --- |"]
        lines += [f"| {row.label} | {show(found[SPLIT].get(row.key))} |" for row in HANDOFF_ROWS]
    lines += ["", *_cpu(runs)]
    errors = sorted({error for run in runs for error in run.errors})
    return lines + [f"- failed: {error}" for error in errors]


def _cell(row: Row, found: Mapping[str, Spread]) -> str:
    text = show(found.get(row.key))
    failed = found.get("failed")
    if row.key == "requests" and failed is not None:
        text += f", {failed.high:g} failed"
    return text


def _ratio(row: Row, split: Spread | None, aggregated: Spread | None) -> str:
    if split is None or aggregated is None or not row.better or not aggregated.median:
        return ""
    return f"{split.median / aggregated.median:.2f}"


def _cpu(runs: Sequence[Run]) -> list[str]:
    """Share of a core per process while its set-up was measured, and what the idle one used beside it."""
    lines = ["| processor time, % of a core (median) | |", "| --- | --- |"]
    for name in NAMES:
        used = spreads([run.cpu for run in runs if run.setup == name])
        own = {what.partition("/")[2]: value for what, value in used.items() if what.startswith(f"{name}/")}
        idle = sum(value.median for what, value in used.items() if "/" in what and not what.startswith(f"{name}/"))
        shares = ", ".join(f"{what} {value.median * 100:.0f}" for what, value in own.items())
        client = used["client"].median * 100 if "client" in used else 0.0
        lines.append(f"| {name} | {shares}; client {client:.0f}; the idle set-up {idle * 100:.0f} |")
    return lines


def _overhead(found: Mapping[str, float | None]) -> list[str]:
    lines = ["", "## Router overhead: a worker that answers at once, one request at a time", ""]
    lines += ["| | HTTP | gRPC |", "| --- | --- | --- |"]
    lines += [
        f"| {label} | {number(found[f'http_{key}'])} | {number(found[f'grpc_{key}'])} |" for key, label in OVERHEAD_ROWS
    ]
    lines += ["", "| end to end, p50 / p99 ms | 1 token | 32 tokens, one message each |", "| --- | --- | --- |"]
    for way in ("direct", "http", "grpc"):
        cells = [f"{number(found[f'{way}_{n}_p50'])} / {number(found[f'{way}_{n}_p99'])}" for n in (1, 32)]
        lines.append(
            f"| {'straight to the worker' if way == 'direct' else f'through the router, {way}'} | {' | '.join(cells)} |"
        )
    lines += ["", "| 64 at a time over HTTP, 32 tokens in one message | |", "| --- | --- |"]
    lines += [
        f"| {label} | {number(found[key])} |"
        for key, label in (
            ("load_requests_s", "requests/s"),
            ("load_tok_s", "tokens/s"),
            ("load_p50", "p50, ms"),
            ("load_p99", "p99, ms"),
            ("load_router_cpu", "router's processor time per request, ms"),
            ("load_client_cpu", "this client's processor time per request, ms"),
        )
    ]
    return lines


def show(value: Spread | None) -> str:
    """`12.3 (11.0 - 14.2)`; without brackets where nothing varied."""
    if value is None:
        return "-"
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)} - {number(value.high)})"


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"
