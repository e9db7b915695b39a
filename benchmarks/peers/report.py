"""Outcome -> Markdown and JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.bench import Run
from benchmarks.figures import Row, spreads
from benchmarks.peers.aims import AIMS, MEGABYTES, RATE, Aim, Verdict, judge
from benchmarks.peers.plan import ATTAINED, SLO, Size
from benchmarks.report import head, number, show

ROWS = (
    Row("ttft_p50", "TTFT p50, ms"),
    Row("ttft_p99", "p99"),
    Row("itl_p50", "ITL p50, ms"),
    Row("itl_p99", "p99"),
    Row("tpot_p50", "TPOT p50, ms"),
    Row("output_tok_s", "output tok/s", 1),
    Row("attainment", "share in SLO", 1),
    Row("long_ttft_p50", "long TTFT p50, ms"),
    Row("prompt_tokens", "prompt tokens", 0),
    Row("failed", "failed"),
    Row("cpu", "cores used", 0),
    Row("cpu_idle", "by the idle", 0),
    Row(RATE, "chats a second", 1),
    Row(MEGABYTES, "MB"),
)
PROBED = {
    "attainment": "share in SLO",
    "ttft_p50": "TTFT p50, ms",
    "tpot_p50": "TPOT p50, ms",
    "itl_p99": "ITL p99, ms",
}
NOTES = f"""\
Formulas (client side): TTFT sent -> first chunk with text; ITL each gap between chunks, pooled over the requests of a
run; TPOT (last chunk - first) / (output tokens - 1). Servers are asked over HTTP through their routers; libraries
generate in a process of their own, and tell when each token came, counted from when they were asked. Each worker has
one core, libraries the first; routers, front ends and the client share the cores that are left, or all where none is.
Set-ups of a stage are up together and take turns; peers are stopped (SIGSTOP) while it is not their turn, Headrace's
idle ones are not ("by the idle": cores they used meanwhile).
Cells are the median over runs, least and greatest in brackets; ratios are taken turn by turn, then their median, least
and greatest. SLO of chats: TTFT <= {SLO.ttft:g} s and TPOT <= {SLO.tpot * 1000:g} ms. The highest rate is found to
a tenth: as long as {ATTAINED:.0%} of the chats of a probe keep the SLO, beside a long prompt every 20 s. Memory:
high-water marks of resident memory of all processes of a worker, added up (pages that they share count more than
once), of the greater worker.
"""


@dataclass(slots=True)
class Outcome:
    """Everything measured, and what could not be. `peers`: name -> what it is; `absent`: name -> why.

    `probes`: the runs at each rate that the search for the highest one tried.
    """

    runs: list[Run] = field(default_factory=list)
    probes: list[Run] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def markdown(model: str, size: Size, outcome: Outcome, machine: Mapping[str, str]) -> str:
    """The page."""
    lines = [f"# Headrace beside its peers: {model}, {size.name}", "", *head(machine)]
    lines.append(f"- turns: seeds {', '.join(map(str, size.seeds))}, {size.rounds} round(s) each")
    lines += [f"- {name}: {what}" for name, what in outcome.peers.items()]
    lines += [f"- absent: {name}: {why}" for name, why in outcome.absent.items()]
    lines += [
        "",
        "## Aims",
        "",
        "| work | Headrace | peer | ratio | aim | reached |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_aim(judge(aim, outcome.runs)) for aim in AIMS]
    for work in dict.fromkeys(run.workload for run in outcome.runs):
        lines += _work(work, [run for run in outcome.runs if run.workload == work])
    lines += _probes(outcome.probes)
    return "\n".join([*lines, "", "## How to read this", "", NOTES])


def document(model: str, size: Size, outcome: Outcome, machine: Mapping[str, str]) -> dict[str, object]:
    """Every run's figures and samples, and the ratios."""
    verdicts = [asdict(found) | {"reached": found.reached} for found in (judge(aim, outcome.runs) for aim in AIMS)]
    return {"machine": dict(machine), "model": model, "size": asdict(size), "aims": verdicts, **asdict(outcome)}


def _aim(found: Verdict) -> str:
    aim = found.aim
    sides = [f"{show(found.ours)} ({aim.ours})", f"{show(found.theirs)} ({_theirs(aim)})" if aim.theirs else ""]
    bound = f"{'<=' if aim.most else '>='} {aim.bound:g}"
    reached = {True: "yes", False: "no", None: "not measured"}[found.reached]
    return f"| {aim.label} | {' | '.join(sides)} | {show(found.ratio)} | {bound} | {reached} |"


def _theirs(aim: Aim) -> str:
    return aim.theirs[0] if len(aim.theirs) == 1 else f"better of {', '.join(aim.theirs)}"


def _work(work: str, runs: Sequence[Run]) -> list[str]:
    found = {
        name: spreads([r.figures for r in runs if r.setup == name]) for name in dict.fromkeys(r.setup for r in runs)
    }
    rows = [row for row in ROWS if any(row.key in figures for figures in found.values())]
    lines = ["", f"## {work}", "", f"| | {' | '.join(row.label for row in rows)} |", "| --- |" + " --- |" * len(rows)]
    for name, figures in found.items():
        lines.append(f"| {name} | {' | '.join(show(figures.get(row.key)) for row in rows)} |")
    errors = sorted({f"{run.setup}: {error}" for run in runs for error in run.errors})
    return lines + [f"- failed: {error}" for error in errors]


def _probes(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return []
    lines = ["", "## capacity: probes", "", f"| | chats a second (seed) | {' | '.join(PROBED.values())} |"]
    lines.append("| --- | --- |" + " --- |" * len(PROBED))
    for run in sorted(runs, key=lambda run: (run.setup, run.seed, run.workload)):
        cells = " | ".join(number(run.figures.get(key)) for key in PROBED)
        lines.append(f"| {run.setup} | {run.workload.rpartition(' ')[2]} ({run.seed}) | {cells} |")
    return lines
