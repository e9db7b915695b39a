"""An interference run over time, split beside aggregated: every request, both phases, every gap between tokens.

All set-ups have the same axes. A mark is a chunk of text, a plain bar a prompt that is read; where marks are missing,
somebody waited.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plots.data import CHAT, Course
from benchmarks.plots.style import Theme, caption

MS = 1000.0
_KEY = (
    "Plain bars: prompts, from sending to the first token (thick: long ones, shaded everywhere). "
    "Coloured marks: each chunk of text."
)
_TITLES = {
    "split": "split: 1 prefill + 1 decode worker",
    "aggregated": "aggregated: 2 workers that do both",
}


def paint(figure: Figure, found: Sequence[Course], theme: Theme, origin: str) -> None:
    """Three rows: requests, how many are in which phase, gaps."""
    grid = figure.subplots(3, len(found), sharex=True, sharey="row", squeeze=False, height_ratios=(3.2, 1.2, 2.2))
    styles = theme.styles(course.setup for course in found)
    for column, course in enumerate(found):
        colour, _ = styles[course.setup]
        lanes, phases, gaps = grid[:, column]
        for axes in grid[:, column]:
            for start, end in course.long_reads:
                axes.axvspan(start, end, color=theme.shade, linewidth=0, zorder=0)
        _lanes(lanes, course, theme, colour)
        _phases(phases, course, theme, colour)
        _gaps(gaps, course, colour)
        lanes.set_title(_TITLES.get(course.setup, course.setup))
        gaps.set_xlabel("seconds")
    longest = max(course.seconds for course in found)
    most = max((gap for course in found for _, gap in course.gaps), default=0.001)
    grid[0][0].set_xlim(0, longest)
    grid[0][0].invert_yaxis()
    grid[2][0].set_ylim(0, MS * most * 1.18)
    grid[1][0].set_ylim(0, 1.4 * max(max(phase.counts) for one in found for phase in (one.reading, one.writing)))
    grid[0][0].set_ylabel("requests,\nas they came")
    grid[1][0].set_ylabel("requests in\neach phase")
    grid[2][0].set_ylabel("gap between\ntokens, ms")
    caption(figure, f"{_KEY}\n{origin}", theme)


def _lanes(axes: Axes, course: Course, theme: Theme, colour: str) -> None:
    for lane, one in enumerate(course.samples):
        if one.chunks:
            axes.hlines(lane, one.sent, one.chunks[0], color=theme.ink, linewidth=2.0 if one.kind == CHAT else 4.5)
    lanes = [np.asarray(one.chunks) for one in course.samples]
    axes.eventplot(lanes, linelengths=0.75, linewidths=0.7, colors=colour, rasterized=True)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")


def _phases(axes: Axes, course: Course, theme: Theme, colour: str) -> None:
    reading, writing = course.reading, course.writing
    pools = (" (prefill pool)", " (decode pool)") if course.setup.endswith("split") else ("", "")
    axes.fill_between(
        writing.times, writing.counts, step="post", color=colour, alpha=0.35, lw=0, label=f"being answered{pools[1]}"
    )
    axes.step(reading.times, reading.counts, where="post", color=theme.ink, lw=1.2, label=f"being read{pools[0]}")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.legend(loc="upper left", ncols=2, fontsize=7.5, borderaxespad=0.1, handlelength=1.2)


def _gaps(axes: Axes, course: Course, colour: str) -> None:
    found = course.gaps
    axes.plot([at for at, _ in found], [MS * gap for _, gap in found], ".", ms=2.6, color=colour, rasterized=True)
    if found:
        at, gap = max(found, key=lambda each: each[1])
        side = "right" if at > course.seconds / 2 else "left"
        axes.annotate(
            f"longest: {MS * gap:,.0f} ms",
            (at, MS * gap),
            xytext=(0, 5),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=8,
        )
