"""Log lines: plain and JSON, one line an event."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from cluster.logs import setup_logging


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
    setup_logging("decode-0", "warning", as_json=True, stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("engine").exception("step failed")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["program"], entry["message"]) == ("error", "decode-0", "step failed")
    assert "ValueError: boom" in entry["error"]
