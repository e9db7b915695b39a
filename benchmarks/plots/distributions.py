"""TTFT as a cumulative share, ITL as the share of gaps that are longer: the middle is paid for, the tail is felt.

Times are logarithmic; so are the shares of gaps, down to one gap, as one in a hundred is already a stutter.
"""

from collections.abc import Sequence
from itertools import chain

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.data import Curves
from benchmarks.plots.style import Style, Theme, caption, milliseconds
from benchmarks.report import number
from benchmarks.timeline import percentile

MS = 1000.0
_MOST_POINTS = 400
_TAIL = 200  # all of the slowest


def paint(figure: Figure, found: Sequence[Curves], theme: Theme, origin: str) -> None:
    """A row for each workload: TTFT on the left, ITL on the right."""
    grid = figure.subplots(len(found), 2, squeeze=False)
    ranges = [_range(found, which) for which in ("ttft", "itl")]
    styles = theme.styles(setup for curves in found for setup in curves.ttft)
    for row, curves in zip(grid, found, strict=True):
        for axes, name, values, limits in zip(
            row, ("time to first token", "time between tokens"), (curves.ttft, curves.itl), ranges, strict=True
        ):
            _curves(axes, values, styles, tail=values is curves.itl)
            milliseconds(axes, *limits)
            axes.set_title(f"{curves.workload}: {name}")
            axes.set_xlabel("milliseconds (logarithmic)")
    caption(figure, origin, theme)


def cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(value, share that is at most so large), thinned evenly; the least and the slowest are all there."""
    ordered = sorted(values)
    count = len(ordered)
    even = {round(at * (count - 1) / _MOST_POINTS) for at in range(_MOST_POINTS + 1)}
    places = sorted(even | set(range(max(0, count - _TAIL), count)))
    return [ordered[0], *(ordered[at] for at in places)], [0.0, *((at + 1) / count for at in places)]


def height(found: Sequence[Curves]) -> float:
    """Of the picture, in inches: every set-up has its line below its axes."""
    return 0.4 + sum(2.7 + 0.19 * len(curves.ttft) for curves in found)


def _curves(axes: Axes, values: dict[str, list[float]], styles: dict[str, Style], *, tail: bool) -> None:
    axes.set_ylabel("share of gaps longer than that" if tail else "share of requests at least so fast")
    if not any(values.values()):  # answers of one token have no gaps
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", va="center")
        return
    for name, (colour, line) in styles.items():
        if not (times := values.get(name)):
            continue
        p50, p99 = (MS * (percentile(times, percent) or 0.0) for percent in (50, 99))
        xs, ys = cumulative([MS * each for each in times])
        label = f"{name}: p50 {number(p50)} ms, p99 {number(p99)} ms, of {len(times):,}"
        shares = [max(1 - y, 0.5 / len(times)) for y in ys] if tail else ys
        axes.step(xs, shares, where="post", color=colour, linestyle=line, linewidth=1.8, label=label)
    if tail:
        least = 1 / max((len(times) for times in values.values()), default=1)
        axes.set_yscale("log")
        axes.set_ylim(least / 1.5, 1.15)
        marks = [share for share in (1.0, 0.1, 0.01, 0.001, 0.0001) if share >= least]
        axes.set_yticks(marks, [f"{share:.2g}" for share in marks])
    else:
        axes.set_ylim(0, 1.02)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.2), borderaxespad=0, fontsize=8.5)


def _range(found: Sequence[Curves], which: str) -> tuple[float, float]:
    """The same for all rows, in milliseconds: all but the least hundredth of what is least, which may be next to 0."""
    every = [[MS * value for value in values] for curves in found for values in getattr(curves, which).values()]
    firsts = [percentile([value for value in values if value > 0], 1) for values in every]
    least = min((first for first in firsts if first is not None), default=1.0)
    return least / 1.5, max([least, *chain.from_iterable(every)]) * 1.3
