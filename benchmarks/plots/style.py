"""One look for all pictures: Okabe and Ito's colours (2008), which colour-blind people tell apart, and lines to match.

A picture has its own background, so it can be read on any page; for pages in the dark there is a second one.
"""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.data import NAMES, in_order

Style = tuple[str, str]
"""A colour and a line."""

DPI = 144
_LETTERS_PER_INCH = 16  # of the small print
_LINES = ("-", "--", ":", "-.")
_COMMON: dict[Any, Any] = {  # the library types its keys by name
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "headrace",  # the same result gives the same bytes
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True)
class Theme:
    """`suffix` of its files. `split` and `aggregated` are the set-ups', `others` more programs' beside these; `shade`
    lies behind what is drawn.
    """

    suffix: str
    ground: str
    ink: str
    faint: str
    split: str
    aggregated: str
    shade: str
    others: tuple[str, ...]

    def styles(self, setups: Iterable[str]) -> dict[str, Style]:
        """Of each set-up, in order: a colour for each program, a line for each of its kinds.

        A set-up is called "split" or "aggregated" where only this program is measured, else "vllm split" or the like.
        """
        colours = (self.split, self.aggregated, *self.others)
        found: dict[str, Style] = {}
        kinds: dict[str, int] = {}  # program -> how many of its kinds there were
        for name in in_order(setups):
            program = name.partition(" ")[0]
            first = NAMES.index(program) if program in NAMES else 0
            kind = kinds[program] = kinds.get(program, first - 1) + 1
            found[name] = colours[list(kinds).index(program) % len(colours)], _LINES[kind % len(_LINES)]
        return found


LIGHT = Theme(
    "", "#ffffff", "#24292f", "#d8dee4", "#0072b2", "#d55e00", "#f3e3c3", ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
)
DARK = Theme(
    "-dark",
    "#0d1117",
    "#d7dde4",
    "#30363d",
    "#56b4e9",
    "#e69f00",
    "#3d3216",
    ("#009e73", "#cc79a7", "#f0e442", "#d55e00"),
)


def draw(theme: Theme, size: tuple[float, float], paint: Callable[[Figure], None]) -> Figure:
    """A figure in this theme; `size` in inches."""
    colours: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), theme.ink
    )
    grounds: dict[Any, Any] = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.ground)
    with mpl.rc_context({**_COMMON, **colours, **grounds, "grid.color": theme.faint}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
    return figure


def save(figure: Figure, folder: Path, stem: str, theme: Theme) -> list[Path]:
    """PNG and SVG; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{theme.suffix}.{kind}" for kind in ("png", "svg")]
    with mpl.rc_context(_COMMON):
        figure.savefig(paths[0], dpi=DPI, metadata={"Software": None})
        figure.savefig(paths[1], dpi=DPI, metadata={"Date": None, "Creator": "headrace"})
    return paths


def caption(figure: Figure, text: str, theme: Theme) -> None:
    """What was measured where, in small print below."""
    width = round(_LETTERS_PER_INCH * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())
    figure.supxlabel(text, fontsize=7.5, color=theme.ink, alpha=0.75, x=0.01, ha="left")


def milliseconds(axes: Axes, low_ms: float, high_ms: float) -> None:
    """A logarithmic axis of times along x, with plain numbers."""
    axes.set_xscale("log")
    axes.set_xlim(low_ms, high_ms)
    marks = [m * 10**e for e in range(-2, 6) for m in (1, 2, 5) if low_ms <= m * 10**e <= high_ms]
    few = [mark for mark in marks if not str(f"{mark:g}").strip("0.").startswith(("2", "5"))]
    shown = marks if len(marks) <= 7 else few
    axes.set_xticks(shown, [f"{mark:,g}" for mark in shown])
    axes.minorticks_off()
