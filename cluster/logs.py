"""Logging of every program: standard library, one line an event, to stderr. Never a prompt, never an output (I10)."""

import json
import logging
import sys
from typing import Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, program, logger, message and the traceback if there is one."""

    def __init__(self, program: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def setup_logging(program: str, level: Level, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (stderr). Replaces earlier handlers; libraries speak from WARNING up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    plain = logging.Formatter(f"%(asctime)s %(levelname)-7s {program} %(name)s: %(message)s")
    handler.setFormatter(JsonLines(program) if as_json else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for ours in ("cluster", "router", "prefill_worker", "decode_worker", "kv_transfer", "engine"):
        logging.getLogger(ours).setLevel(level.upper())
