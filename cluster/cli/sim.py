"""`headrace sim`: many seeded worlds on virtual time; the exit code says whether all invariants held."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

Seed = Annotated[int, typer.Option("--seed", help="the first seed")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="how many, from there on")]
Trace = Annotated[bool, typer.Option("--trace", help="tell every message and every fault")]


def sim(seed: Seed = 0, seeds: Seeds = 1, trace: Trace = False) -> None:
    """Simulate a cluster of two routers and four workers under seeded load and faults, and check every answer."""
    from simulation.run import simulate  # heavy, and wanted by this command alone

    out = Console(highlight=False, soft_wrap=True)
    failed = []
    for number in range(seed, seed + seeds):
        verdict = simulate(number, trace=print if trace else None)
        if verdict.violation:
            failed.append(number)
        if verdict.violation or seeds == 1:
            out.print(escape(verdict.line()))
    if seeds > 1:
        out.print(f"{seeds} seeds, {len(failed)} failed" + (f": {failed}" if failed else ""))
    if failed:
        raise typer.Exit(1)
