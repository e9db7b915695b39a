"""Log lines: plain and JSON, one line an event."""

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator
from typing import get_args

import pytest

from cluster.core.errors import ConfigError
from cluster.logs import ATTEMPT, BURST, LINES_PER_S, REQUEST, Form, Sparing, log_loop_error, setup_logging
from router.front.errors_http import log_failure

TEXT = "Zwetschgenknoedel"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = ("cluster", "router", "prefill_worker", "decode_worker", "kv_transfer", "engine")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


def test_plain_lines_name_the_program() -> None:
    stream = io.StringIO()
    setup_logging("decode-0", "info", stream=stream)
    logging.getLogger("decode_worker.server").info("ready at %s", "here")
    logging.getLogger("decode_worker.server").debug("not shown")
    logging.getLogger("some.library").info("not shown")
    assert stream.getvalue().count("\n") == 1
    assert "decode-0 decode_worker.server: ready at here" in stream.getvalue()


def test_json_lines_carry_the_traceback_in_one_line() -> None:
    stream = io.StringIO()
    setup_logging("decode-0", "warning", form="json", stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("engine").exception("step failed")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["program"], entry["message"]) == ("error", "decode-0", "step failed")
    assert entry["error"].endswith("ValueError")
    assert 'raise ValueError("boom")' in entry["error"], "where it was"


def test_json_lines_name_the_request_that_they_are_about() -> None:
    stream = io.StringIO()
    setup_logging("router-0", "info", "json", stream=stream)
    log_failure(logging.getLogger("router.front"), "theirs-1", ValueError("a secret"))
    logging.getLogger("router.front").warning("about nobody")
    told, other = map(json.loads, stream.getvalue().splitlines())
    assert told["request"] == "theirs-1"
    assert "a secret" not in json.dumps(told)
    assert "request" not in other


def _fail(text: str) -> None:
    try:
        dict[str, int]()[text]
    except KeyError as error:
        raise ConfigError("engine.dtype: not possible") from error


@pytest.mark.parametrize("form", ["json", "plain"])
def test_tracebacks_do_not_repeat_what_foreign_errors_say(form: Form) -> None:
    stream = io.StringIO()
    setup_logging("router-0", "info", form, stream=stream)
    for raised in (ValueError(TEXT), KeyError(TEXT), json.JSONDecodeError(TEXT, TEXT, 0), RuntimeError(TEXT)):
        try:
            raise raised
        except (ValueError, KeyError, RuntimeError):
            logging.getLogger("some.library").exception("in the application")
    try:
        _fail(TEXT)
    except ConfigError:
        logging.getLogger("router").exception("ours")
    told = stream.getvalue()
    assert TEXT not in told
    assert told.count("test_logs.py") >= 6
    for kind in ("ValueError", "KeyError", "json.decoder.JSONDecodeError", "RuntimeError"):
        assert kind in told
    assert "ConfigError: engine.dtype: not possible" in told


async def test_what_nobody_waited_for_is_told_without_what_it_says() -> None:
    stream = io.StringIO()
    setup_logging("router-0", "info", stream=stream)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_error)

    async def lost() -> None:
        raise ValueError(TEXT)

    task = loop.create_task(lost())
    await asyncio.wait({task})
    del task
    gc.collect()
    assert "never retrieved" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert TEXT not in stream.getvalue()


def line(level: int, at: float, **about: str) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "router.lines", "levelno": level, "msg": "lost", "created": at, **about})
    made.levelname = logging.getLevelName(level)
    return made


def test_a_storm_of_lines_about_requests_is_bounded_and_says_how_many_it_left_out() -> None:
    sparing = Sparing()
    passed = [sparing.filter(line(logging.WARNING, 100.0, **{ATTEMPT: f"{n}.1"})) for n in range(BURST + 300)]
    assert sum(passed) == BURST
    assert sparing.filter(line(logging.WARNING, 100.0)), "what is about nobody"
    assert sparing.filter(line(logging.ERROR, 100.0, **{REQUEST: "bad"})), "errors always"
    later = line(logging.WARNING, 100.0 + 1.5 / LINES_PER_S, **{REQUEST: "r"})
    assert sparing.filter(later)
    assert getattr(later, "left_out", 0) == 300
    back = line(logging.WARNING, 50.0, **{REQUEST: "the clock went back"})
    assert not sparing.filter(back)


def test_both_forms_tell_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.logs.BURST", 1)
    for form in get_args(Form):
        stream = io.StringIO()
        setup_logging("router-0", "info", form, stream=stream)
        (handler,) = logging.getLogger().handlers
        for at, name in ((100.0, "a"), (100.0, "b"), (101.0, "c")):
            handler.handle(line(logging.WARNING, at, **{REQUEST: name, ATTEMPT: f"ours-{name}.2"}))
        first, last = stream.getvalue().splitlines()
        if form == "json":
            assert "left_out" not in json.loads(first)
            assert (told := json.loads(last))["left_out"] == 1
            assert (told["request"], told["attempt"]) == ("c", "ours-c.2")
        else:
            assert "left out" not in first
            assert last.endswith("(1 lines about requests before it were left out)")
