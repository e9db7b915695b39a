"""The command line: its surface, its errors, and what it shows."""

import hashlib
import io
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from cluster.cli.ask import Answer, Question, timings
from cluster.cli.keys import table
from cluster.cli.main import app, main
from cluster.cli.operate import sizes_of, wait_for_successor
from cluster.cli.show import routers, show_urls, status_json, status_table, watch
from cluster.cli.start import StartFailed, _wait_until_ready
from cluster.config import load_config
from cluster.controller import ClusterStatus
from cluster.core.errors import ConfigError, HeadraceError
from cluster.pipe import Ready, Role
from cluster.run_dir import RunDir
from cluster.stubs import inference_pb2
from cluster.supervisor import ProgramStatus

REACH = {"--ca-file", "--cert-file", "--key-file", "--server-name"}
SURFACE = {
    "up": {"--file", "-f", "--set", "--root", "--detach", "-d", "--ask"},
    "run": {"--file", "-f", "--set", "--root", "--ask"},
    "down": {"--name", "--root"},
    "status": {"--name", "--root", "--json", "--watch", "-w"},
    "config": {"--file", "-f", "--set", "--reference"},
    "scale": {"--name", "--root", "sizes"},
    "node": {"--file", "-f", "--set", "--places", "--root", "kind", "ray_options"},
    "leave": {"--name", "--root", "--after"},
    "drain": {"--name", "--root", "program"},
    "generate": {"--max-tokens", "--temperature", "--raw", "--name", "--root", "--address", "--tls", "text"} | REACH,
    "usage": {"--since", "--until", "--name", "--root", "--address"} | REACH,
    "explain": {"--name", "--root", "--address", "--json", "request"} | REACH,
    "model": {"pull", "list"},
    "bench": {"plot"},
    "key": {"tenant", "--redis", "--set", "--revoke", "--list", "--file", "-f", "--name", "--root"},
    "sim": {"--seed", "--seeds", "--trace"},
    "chaos": {
        "--minutes",
        "--seed",
        "--model",
        "--tcp",
        "--prefill",
        "--decode",
        "--routers",
        "--clients",
        "--rules",
        "--logs",
    },
}
READY = Ready(
    name="router-0", role="router", address="127.0.0.1:8001", epoch=1, http="http://127.0.0.1:8000", pids=(7,)
)
ROUTER = ProgramStatus("router-0", "router", 5, 2, "ready", READY, 7)
DEAD = ProgramStatus("decode-0", "decode", 6, 9, "waiting", last_exit=1, restarts=3, early_deaths=3)
STATUS = ClusterStatus(4, {"prefill": 0, "decode": 1, "router": 1}, (DEAD, ROUTER), ())


def test_surface() -> None:
    """Changing a command or an option is a decision, not an accident."""
    commands = getattr(get_command(app), "commands", {})
    found = {}
    for name, command in commands.items():
        names = {option for parameter in command.params for option in parameter.opts} - {"--help"}
        found[name] = set(getattr(command, "commands", {})) or names
    assert found == SURFACE


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--set", "engine.dtyp=float32"], 1, "did you mean engine.dtype?"),
        (["up", "-f", "nowhere.yaml"], 1, "nowhere.yaml"),
        (["up", "--set", "model=/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["status"], 1, "headrace is not running"),
        (["leave"], 1, "no cluster has been started here"),
        (["node", "decode"], 1, "ray.address: None is not the head's host:port"),
        (["node", "boss"], 2, "boss"),
        (["generate", "hello"], 1, "no cluster has been started here"),
        (["generate", "hello", "--address", "127.0.0.1:1", "--ca-file", "nowhere.pem"], 1, "nowhere.pem"),
        (["generate", "hello", "--address", "127.0.0.1:1", "--cert-file", "a"], 1, "go together"),
        (["scale", "boss", "1"], 1, "prefill, decode, router"),
        (["scale", "decode", "-1"], 2, "-1"),
        (["scale", "decode=2", "prefill"], 1, "expected role=count, for example prefill=2"),
        (["scale", "decode=2", "decode=3"], 1, "decode appears twice"),
        (["scale", "decode=2"], 1, "headrace is not running"),
        (["drain", "decode-0"], 1, "headrace is not running"),
        (["model", "pull", "nothing"], 1, "smollm2-135m"),
        (["upp"], 2, "No such command"),
    ],
)
def test_errors_are_readable(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = [] if arguments[0] in ("model", "upp") else ["--root", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments, *root])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr()
    assert left.value.code == code
    assert words in " ".join(shown.err.split())
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["decode", "2"], {"decode": 2}),
        (["decode=0"], {"decode": 0}),
        (["prefill=3", "decode=2"], {"prefill": 3, "decode": 2}),
        (["router=2", "prefill=3", "decode=2"], {"router": 2, "prefill": 3, "decode": 2}),
    ],
)
def test_sizes(words: list[str], counts: dict[Role, int]) -> None:
    assert sizes_of(words) == counts


@pytest.mark.parametrize(
    "words", [["decode"], ["decode", "two"], ["decode=-1"], ["boss=1"], ["decode="], ["1", "2", "3"]]
)
def test_sizes_that_are_none(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        sizes_of(words)


def test_after_a_drain_the_new_life_is_waited_for() -> None:
    """Until it is ready; not at all when none is desired; not for ever when it keeps dying."""
    gone = ClusterStatus(1, {"router": 1}, (), ("router-0",))
    starting = ClusterStatus(2, {"router": 1}, (replace(ROUTER, state="starting", ready=None),), ())
    ready = ClusterStatus(3, {"router": 1}, (ROUTER,), ())
    seen = iter([gone, starting, ready])
    assert wait_for_successor(lambda version, _: next(one for one in seen if one.version > version), "router-0")
    assert list(seen) == []
    fewer = ClusterStatus(4, {"router": 1}, (ROUTER,), ())
    assert not wait_for_successor(lambda *_: fewer, "router-1")
    dead = ClusterStatus(5, {"decode": 1}, (DEAD,), ())
    with pytest.raises(HeadraceError, match="does not start again"):
        wait_for_successor(lambda *_: dead, "decode-0")
    with pytest.raises(HeadraceError, match="not ready again"):
        wait_for_successor(lambda *_: gone, "router-0", within_s=0)


def test_down_removes_what_a_killed_head_left(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "mill")
    run_dir.folder.mkdir()
    left = run_dir.ray_folder()
    result = CliRunner().invoke(app, ["down", "--name", "mill", "--root", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "mill was not running\n")
    assert not left.exists()


def test_down_when_nothing_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["down", "--root", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, "headrace was not running\n")


def test_status_for_people_and_for_programs() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120)
    console.print(status_table(STATUS))
    show_urls(STATUS, console)
    shown = text.getvalue()
    for part in ("decode-0", "waiting", "last exit code 1", "router-0", "http://127.0.0.1:8000", "gRPC 127.0.0.1:8001"):
        assert part in shown
    assert routers(STATUS) == [READY]
    told = json.loads(status_json(STATUS))
    assert told["ready"] is False
    assert told["programs"][1]["ready"]["http"] == "http://127.0.0.1:8000"


def _head(*statuses: ClusterStatus, code: int = 0) -> "subprocess.Popen[bytes]":
    """A process that relays these statuses and leaves."""
    lines = b"".join(msgspec.json.encode(status) + b"\n" for status in statuses)
    script = f"import sys; sys.stdout.buffer.write({lines!r}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


@pytest.mark.processes
def test_up_ends_when_everything_is_ready_or_something_clearly_will_not_be(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (tmp_path / "logs").mkdir()
    run_dir.log_file("decode-0").write_text("first\nthe reason\n")
    whole = ClusterStatus(5, {"prefill": 0, "decode": 0, "router": 1}, (ROUTER,), ())
    unusable = ProgramStatus("decode-0", "decode", 6, 1, "waiting", last_exit=2, restarts=1, early_deaths=1)
    console = Console(file=io.StringIO())
    with _head(ClusterStatus(1, whole.desired, (), ()), whole) as head:
        assert _wait_until_ready(head, run_dir, console) == whole
    with (
        _head(STATUS) as head,
        pytest.raises(StartFailed, match=r"decode-0 .*exit code 1.*\n    first\n    the reason"),
    ):
        _wait_until_ready(head, run_dir, console)
    hopeless = ClusterStatus(1, whole.desired, (unusable,), ())
    with _head(hopeless) as head, pytest.raises(StartFailed, match="exit code 2"):
        _wait_until_ready(head, run_dir, console)
    with _head(code=3) as head, pytest.raises(StartFailed, match="ended with 3"):
        _wait_until_ready(head, run_dir, console)


def test_a_key_is_shown_with_the_setting_that_knows_only_its_digest() -> None:
    made = [CliRunner().invoke(app, ["key", "acme"]).stdout.splitlines() for _ in range(2)]
    (key, setting), (another, _) = made
    assert key != another
    assert len(key) > 40
    assert key not in setting
    tenants = load_config(None, [shlex.split(setting)[1]]).tenants
    assert tenants["acme"].keys == (hashlib.sha256(key.encode()).hexdigest(),)


def test_questions() -> None:
    plain = Question("hi").message()
    assert [(m.role, m.content) for m in plain.chat.messages] == [("user", "hi")]
    assert not plain.HasField("max_tokens")
    assert not plain.HasField("temperature")
    raw = Question("hi", raw=True, max_tokens=3, temperature=0.0).message()
    assert (raw.prompt, raw.max_tokens, raw.temperature) == ("hi", 3, 0.0)
    assert raw.HasField("temperature")


def test_timings() -> None:
    summary = inference_pb2.Summary(
        prompt_tokens=30, completion_tokens=4, cached_tokens=16, prefill_worker="prefill-0", decode_worker="decode-1",
        kv_bytes=1_500_000, timings_ms={"exposed_transfer": 1.25},
    )  # fmt: skip
    rows = dict(timings(Answer(asked=10.0, arrivals=[10.5, 10.52, 10.56, 10.58], summary=summary, reason="stop")))
    assert rows == {
        "TTFT": "500 ms",
        "ITL": "20.0 ms median, 40.0 ms longest",
        "tokens": "30 in (16 cached), 4 out, ended by stop",
        "KV moved": "1.50 MB",
        "prefill": "prefill-0",
        "decode": "decode-1",
        "exposed_transfer": "1.2 ms",
    }
    assert timings(Answer(asked=1.0)) == []


def test_watching_shows_every_change_once_and_ends_with_the_cluster() -> None:
    """Not the desired count alone: nothing of it is to be seen yet."""
    wanted = replace(STATUS, version=5, desired={**STATUS.desired, "prefill": 1})
    starting = ProgramStatus("prefill-0", "prefill", 9, 1, "starting", pid=8)
    grown = replace(wanted, version=7, programs=(*STATUS.programs, starting))
    said, asked = iter([STATUS, STATUS, wanted, grown]), []

    def look(version: int, _: float) -> ClusterStatus:
        asked.append(version)
        try:
            return next(said)
        except StopIteration:
            raise HeadraceError("the cluster has gone") from None

    out = Console(file=io.StringIO(), width=120)
    with pytest.raises(HeadraceError, match="gone"):
        watch(look, out)
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert asked == [-1, 4, 4, 5, 7]
    assert (shown.count("router-0"), shown.count("prefill-0")) == (2, 1)
    assert "last exit code 1" in shown
    assert "None" not in shown


def test_what_somebody_wrote_into_the_store_is_text_and_no_markup() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(table({"[/]": "{}", "[red]x": "no JSON", "acme": "{}"}))
    bad, worse, good = out.getvalue().splitlines()[1:]
    assert bad.startswith(" [/]  ")
    assert "left out: tenants: tenants.[/]" in bad
    assert "left out: tenants.[red]x" in worse
    assert good.split()[:2] == ["acme", "none"]
