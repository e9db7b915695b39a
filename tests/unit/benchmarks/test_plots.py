"""Pictures are written, in both themes and kinds, and show what the result says."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from benchmarks.pictures import leave_pictures
from benchmarks.plot import main, pictures, plot
from benchmarks.plots.distributions import cumulative
from benchmarks.plots.style import DARK, LIGHT, draw
from benchmarks.samples import pack
from benchmarks.timeline import Timeline
from cluster.cli.main import app

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


def painted(document: dict[str, object]) -> dict[str, Figure]:
    return {each.name: draw(LIGHT, each.size, partial(each.paint, theme=LIGHT)) for each in pictures(document)}


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
    found = painted(result())
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
    own = LIGHT.styles(["aggregated", "split"])
    assert own == {"split": (LIGHT.split, "-"), "aggregated": (LIGHT.aggregated, "--")}
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


PEERS = ("vllm split", "headrace int8", "headrace aggregated", "llama.cpp Q8_0", "headrace split", "vllm aggregated")


def test_every_set_up_is_drawn_and_no_two_look_alike() -> None:
    samples = pack([Timeline("chat", 0.0, (0.2, 0.3, 0.5)), Timeline("long", 0.1, (0.9, 1.0))], 0.0)
    runs = [{"workload": "mix", "setup": name, "seconds": 1.0, "samples": samples} for name in PEERS]
    found = painted({"runs": runs, "model": "smollm2-135m"})
    for axes in found["latency"].axes:
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == len(PEERS)
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text().partition(":")[0] for text in legend.get_texts()] == [
            *("vllm split", "vllm aggregated", "headrace split", "headrace aggregated", "headrace int8"),
            "llama.cpp Q8_0",
        ]
        least, most = axes.get_xlim()
        assert all(least < x < most for line in axes.lines for x in np.asarray(line.get_xdata()))
    assert [axes.get_title(loc="left") for axes in found["interference"].axes[: len(PEERS)]][:2] == [
        "vllm split",
        "vllm aggregated",
    ]
    assert "smollm2-135m" in (found["latency"].get_supxlabel() or "")


def test_small_print_stays_on_the_picture() -> None:
    long = {**result(), "machine": {"command": "python -m benchmarks.peers " + "--option value " * 30}}
    small = painted(long)["latency"].get_supxlabel() or ""
    assert max(map(len, small.splitlines())) < 160
    assert small.count("value") == 30


def test_answers_of_one_token_have_first_tokens_and_no_gaps() -> None:
    samples = pack([Timeline("chat", at, (at + 0.2,), 128, 1) for at in (0.0, 0.5)], 0.0)
    figure = painted({"runs": [{"workload": "one", "setup": "split", "seconds": 1.0, "samples": samples}]})["latency"]
    ttft, itl = figure.axes
    assert len(ttft.lines) == 1
    assert [text.get_text() for text in itl.texts] == ["nothing to show"]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"runs": None}, "runs is not a list of objects"),
        ({"runs": [1]}, "runs is not a list of objects"),
        ({"runs": [{"workload": "mix", "setup": "split", "samples": [1]}]}, "samples is not a list of objects"),
        ({"runs": [{"workload": "mix", "setup": "split", "samples": [{"kind": "chat"}]}]}, "a sample has no sent_ms"),
        ({"points": {"times": 1}}, "points is not a list of objects"),
        ({"points": [{"rate": None}]}, "rate is not a number but None"),
        ({"cells": [{"trace": 3, "goodput": 1, "refused": 0}]}, "trace is not text but 3"),
        ([], "not a result of a benchmark"),
    ],
)
def test_what_no_benchmark_wrote_is_said_with_its_file(document: object, why: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(orjson.dumps(document))
    done = CliRunner().invoke(app, ["bench", "plot", str(file)])
    assert (done.exit_code, done.output) == (1, f"{file}: cannot be drawn: {why}\n")


def test_the_command_draws_beside_the_result_or_where_it_is_told(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "result.json", tmp_path / "pictures"
    file.write_bytes(orjson.dumps({"points": result()["points"]}))
    for options, folder in ((), tmp_path), (("--out", str(elsewhere)), elsewhere):
        done = CliRunner().invoke(app, ["bench", "plot", str(file), *options])
        names = {f"result-goodput{theme}.{kind}" for theme in ("", "-dark") for kind in ("png", "svg")}
        assert (done.exit_code, set(done.output.split("\n")[:-1])) == (
            0,
            {f"written: {folder / name}" for name in names},
        )
        assert all((folder / name).stat().st_size > 1000 for name in names)


def test_a_benchmark_leaves_its_pictures_beside_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(orjson.dumps({"points": result()["points"]}))
    leave_pictures(file)
    assert capsys.readouterr().out.count("written: ") == 4
    assert (tmp_path / "result-goodput.png").read_bytes().startswith(PNG)


def test_without_what_draws_them_a_benchmark_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.plot")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    leave_pictures(tmp_path / "result.json")
    assert capsys.readouterr().out == "no pictures without matplotlib.figure: pip install 'headrace[bench]'\n"
