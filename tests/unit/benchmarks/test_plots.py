"""Pictures are written, in both themes and kinds, and show what the result says."""

from functools import partial
from pathlib import Path

import numpy as np
import orjson
import pytest

from benchmarks.plot import main, pictures, plot
from benchmarks.plots.distributions import cumulative
from benchmarks.plots.style import DARK, LIGHT, draw
from benchmarks.samples import pack
from benchmarks.timeline import Timeline

PNG = b"\x89PNG\r\n"


def result() -> dict[str, object]:
    chats = [Timeline("chat", at, tuple(at + 0.2 + 0.03 * n for n in range(20)), 128, 20) for at in (0.0, 0.5, 2.5)]
    mixed = pack([*chats, Timeline("long", 1.0, (3.0, 3.1), 3000, 2)], 0.0)
    runs = [{"workload": "interference", "setup": s, "seconds": 4.0, "samples": mixed} for s in ("split", "aggregated")]
    points = [
        {"times": t, "sent": 10, "rate": t, "refused": 1, "goodput": t / 2, "ttft_p50": 100.0, "ttft_p99": 900.0}
        for t in (0.5, 1.0, 2.0)
    ]
    machine = {"processor": "a fast one", "date": "2026-11-30"}
    return {"machine": machine, "plan": {"model": "tracer"}, "runs": runs, "points": points, "slo_s": 2.0}


def test_every_picture_is_written_twice_as_png_and_svg(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(orjson.dumps(result()))
    paths = plot(file, tmp_path / "pictures")
    names = {f"result-{name}{theme}" for name in ("latency", "interference", "goodput") for theme in ("", "-dark")}
    assert {path.stem for path in paths} == names
    assert len(paths) == 2 * len(names)
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(PNG) if path.suffix == ".png" else b"<svg" in data[:1000]
        assert len(data) < 200_000


def test_axes_have_units_and_begin_where_they_should() -> None:
    found = {
        picture.name: draw(LIGHT, picture.size, partial(picture.paint, theme=LIGHT)) for picture in pictures(result())
    }
    for figure in found.values():
        assert all(axes.get_ylabel() or axes.get_shared_y_axes() for axes in figure.axes)
        assert "a fast one" in (figure.get_supxlabel() or "")
    for axes in (*found["goodput"].axes, *found["interference"].axes[2:]):
        assert axes.get_ylim()[0] == 0
    rates, waits = found["goodput"].axes
    assert (rates.get_ylabel(), waits.get_ylabel()) == ("requests/s", "seconds")
    assert np.asarray(rates.lines[1].get_ydata()).tolist() == [0.25, 0.5, 1.0]
    ttft, itl = found["latency"].axes
    assert ttft.get_ylim()[0] == 0
    assert itl.get_yscale() == "log"
    gaps = found["interference"].axes[4:]
    assert [axes.get_ylim() for axes in gaps] == [gaps[0].get_ylim()] * 2, "both sides by one measure"


def test_themes_differ_in_colour_and_set_ups_in_line_as_well() -> None:
    assert LIGHT.of("split")[1] != LIGHT.of("aggregated")[1]
    assert {LIGHT.split, LIGHT.aggregated, LIGHT.ground}.isdisjoint({DARK.split, DARK.aggregated, DARK.ground})


def test_thinned_curves_keep_their_ends() -> None:
    xs, ys = cumulative([float(at) for at in range(100_000)])
    assert len(xs) < 700
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (0.0, 0.0, 99_999.0, 1.0)
    assert xs[-100:] == [float(at) for at in range(99_900, 100_000)], "the slowest are all there"


def test_what_cannot_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, broken = tmp_path / "old.json", tmp_path / "broken.json"
    old.write_text('{"runs": []}')
    broken.write_text("[")
    assert main([str(old), str(broken), str(tmp_path / "none.json")]) == 1
    said = capsys.readouterr().out
    assert "old.json: nothing to draw" in said
    assert "broken.json: cannot be drawn" in said
    assert "none.json: cannot be drawn" in said
