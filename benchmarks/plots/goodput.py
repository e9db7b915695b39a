"""Goodput over load: what is served in time when more and more is asked. Both axes begin at 0."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.data import Load, LoadCurve
from benchmarks.plots.style import Theme, caption


def paint(figure: Figure, found: Sequence[LoadCurve], theme: Theme, origin: str) -> None:
    """A row for each curve: rates on the left, waiting on the right."""
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (rates, waits), curve in zip(grid, found, strict=True):
        points = sorted(curve.points, key=lambda point: point.times)
        _rates(rates, points, theme)
        _waits(waits, points, curve.slo_s, theme)
        name = f"{curve.name}: " if curve.name else ""
        capacity = f" (capacity {curve.capacity:.3g}/s)" if curve.capacity is not None else ""
        rates.set_title(f"{name}requests per second{capacity}")
        waits.set_title(f"{name}time to first token of those served")
    caption(figure, origin, theme)


def _rates(axes: Axes, points: Sequence[Load], theme: Theme) -> None:
    loads = [point.times for point in points]
    axes.plot(loads, [p.offered for p in points], ":", color=theme.ink, label="asked")
    axes.plot(loads, [p.goodput for p in points], "o-", color=theme.split, lw=1.8, label="served in time (goodput)")
    axes.plot(loads, [p.refused for p in points], "s--", color=theme.aggregated, lw=1.4, label="refused with 429")
    _frame(axes, loads, theme, "requests/s")


def _waits(axes: Axes, points: Sequence[Load], slo_s: float | None, theme: Theme) -> None:
    loads = [point.times for point in points]
    for name, values, line, colour in (
        ("p99", [p.ttft_p99 for p in points], "^--", theme.aggregated),
        ("p50", [p.ttft_p50 for p in points], "o-", theme.split),
    ):
        known = [(load, value) for load, value in zip(loads, values, strict=True) if value is not None]
        axes.plot([load for load, _ in known], [value for _, value in known], line, color=colour, label=name)
    if slo_s is not None:
        axes.axhline(slo_s, color=theme.ink, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(f"SLO {slo_s:g} s", (0.02, slo_s), xytext=(2, 3), textcoords="offset points", fontsize=8)
    _frame(axes, loads, theme, "seconds")


def _frame(axes: Axes, loads: Sequence[float], theme: Theme, unit: str) -> None:
    axes.axvline(1.0, color=theme.faint, linewidth=5, zorder=0)
    axes.set_xlim(0, max(loads) * 1.04)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("load, in parts of the capacity (band: 1)")
    axes.set_ylabel(unit)
    axes.legend(loc="best", fontsize=8.5)
