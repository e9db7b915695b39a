"""`headrace bench`: pictures of what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import HeadraceError

bench = typer.Typer(no_args_is_help=True, help="Results of benchmarks.")
Results = Annotated[list[Path], typer.Argument(help="JSON files of results", metavar="RESULT.json...")]
Out = Annotated[Path | None, typer.Option("--out", help="folder of the pictures; beside the results by default")]


@bench.command("plot")
def plot(results: Results, out: Out = None) -> None:
    """Draw results as PNG and SVG, light and dark: latencies, an interference run over time, goodput over load."""
    try:
        from benchmarks.plot import plot_all  # wanted by this command alone, and an extra
    except ModuleNotFoundError as error:
        raise HeadraceError(f"{error.name} is not installed: pip install 'headrace[bench]'") from error
    if not plot_all(results, out, print):
        raise typer.Exit(1)
