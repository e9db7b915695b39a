"""Results to pictures, PNG and SVG, light and dark: `python -m benchmarks.plot RESULT.json... [--out FOLDER]`.

What a result cannot show is said and no error: older ones have no samples and have to be measured again.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import orjson
from matplotlib.figure import Figure

from benchmarks.plots import distributions, goodput, interference
from benchmarks.plots.data import courses, curves, load_curves
from benchmarks.plots.style import DARK, LIGHT, Theme, draw, save


class Paint(Protocol):
    """Draws on a blank figure."""

    def __call__(self, figure: Figure, *, theme: Theme) -> None: ...


@dataclass(frozen=True, slots=True)
class Picture:
    """`size` in inches."""

    name: str
    size: tuple[float, float]
    paint: Paint


def pictures(document: Mapping[str, object]) -> list[Picture]:
    """What a result shows; [] when it has nothing that is drawn here."""
    origin, found = origin_of(document), []
    if by_workload := curves(document):
        paint = partial(distributions.paint, found=by_workload, origin=origin)
        found.append(Picture("latency", (9.6, distributions.height(by_workload)), paint))
    if runs := courses(document):
        size = (4.8 * len(runs), 6.4)
        found.append(Picture("interference", size, partial(interference.paint, found=runs, origin=origin)))
    if loads := load_curves(document):
        paint_loads = partial(goodput.paint, found=loads, origin=origin)
        found.append(Picture("goodput", (9.6, 0.4 + 3.4 * len(loads)), paint_loads))
    return found


def origin_of(document: Mapping[str, object]) -> str:
    """Where, when and how it was measured, for the small print."""
    machine, plan = document.get("machine"), document.get("plan")
    said = machine if isinstance(machine, dict) else {}
    model = (plan if isinstance(plan, dict) else document).get("model")
    parts = [model, said.get("processor"), said.get("date"), said.get("command")]
    return "; ".join(str(part) for part in parts if part)


def plot(file: Path, folder: Path | None = None) -> list[Path]:
    """Draw what one result shows, beside it or into `folder`. Raises OSError, and ValueError for what is no result."""
    document = orjson.loads(file.read_bytes())
    if not isinstance(document, dict):
        raise ValueError("not a result of a benchmark")
    written = []
    for picture in pictures(document):
        for theme in (LIGHT, DARK):
            figure = draw(theme, picture.size, partial(picture.paint, theme=theme))
            written += save(figure, folder or file.parent, f"{file.stem}-{picture.name}", theme)
    return written


def plot_all(files: Sequence[Path], folder: Path | None, say: Callable[[str], None]) -> bool:
    """Draw several; tells what came of each. False when one could not be read, or nothing was drawn at all."""
    good, drawn = True, False
    for file in files:
        try:
            written = plot(file, folder)
        except (OSError, ValueError) as error:
            say(f"{file}: cannot be drawn: {error}")
            good = False
            continue
        drawn = drawn or bool(written)
        for path in written:
            say(f"written: {path}")
        if not written:
            say(f"{file}: nothing to draw: no samples and no load curve (older results have to be measured again)")
    return good and drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, help="folder of the pictures; beside the results by default")
    options = parser.parse_args(arguments)
    return 0 if plot_all(options.results, options.out, print) else 1


if __name__ == "__main__":
    sys.exit(main())
