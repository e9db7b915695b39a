"""Logging of every program: standard library, one line an event, to stderr. Never a prompt, never an output (I10).

What we log holds ids and sizes. What others raise may quote what they were given (a parser its text, a dictionary its
key), so of their errors a traceback shows where and of what kind they were, and not what they say (FAULTS O08).
"""

import asyncio
import json
import logging
import sys
import traceback
from types import TracebackType
from typing import Literal, TextIO

from cluster.core.errors import HeadraceError

_TELL = (HeadraceError, OSError, MemoryError, ImportError)
"""Errors that name addresses, files, settings or ids."""

_log = logging.getLogger(__name__)

REQUEST = "request"
"""In `extra` of what is logged about a request: its `x-request-id`. Workers do not know it."""

ATTEMPT = "attempt"
"""In `extra` of what is logged about one try to serve it: the router's own id of the request, a point, which try."""

LINES_PER_S = 20.0
BURST = 200
_LEFT_OUT = "left_out"

Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
Level = Literal["debug", "info", "warning", "error"]
Form = Literal["plain", "json"]


class Sparing(logging.Filter):
    """Lines about requests (REQUEST, ATTEMPT) come at a bounded rate: a storm of failures must not become one of
    writing. Errors always come. The first line after a gap says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._room = float(BURST)
        self._at = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter. Time is the record's own."""
        if record.levelno >= logging.ERROR or not (hasattr(record, REQUEST) or hasattr(record, ATTEMPT)):
            return True
        self._room = min(BURST, self._room + max(0.0, record.created - self._at) * LINES_PER_S)
        self._at = record.created
        if self._room < 1.0:
            self._left_out += 1
            return False
        self._room -= 1.0
        if self._left_out:
            setattr(record, _LEFT_OUT, self._left_out)
            self._left_out = 0
        return True


class PlainLines(logging.Formatter):
    """Tracebacks without what foreign errors say."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, left_out = super().formatMessage(record), getattr(record, _LEFT_OUT, 0)
        return f"{line} ({left_out} lines about requests before it were left out)" if left_out else line

    def formatException(self, ei: Raised) -> str:
        error = ei[1]
        return "" if error is None else "\n".join(_told(error))


def _told(error: BaseException) -> list[str]:
    """Frames and kinds, from the cause down to the error itself."""
    above = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [] if above is None else [*_told(above), "which led to:"]
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return [*lines, *([frames] if frames else []), f"{kind}: {error}" if isinstance(error, _TELL) else kind]


class JsonLines(PlainLines):
    """One JSON object a line: time, level, program, logger, message; where there are some, the request and the attempt
    that it is about, how many such lines before it were left out, and the traceback."""

    def __init__(self, program: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, str | int] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: str(getattr(record, name)) for name in (REQUEST, ATTEMPT) if hasattr(record, name)}
        if (left_out := getattr(record, _LEFT_OUT, 0)) > 0:
            fields[_LEFT_OUT] = left_out
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def setup_logging(program: str, level: Level, form: Form = "plain", *, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (stderr). Replaces earlier handlers; libraries speak from WARNING up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(Sparing())
    plain = PlainLines(f"%(asctime)s %(levelname)-7s {program} %(name)s: %(message)s")
    handler.setFormatter(JsonLines(program) if form == "json" else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for ours in ("cluster", "router", "prefill_worker", "decode_worker", "kv_transfer", "engine"):
        logging.getLogger(ours).setLevel(level.upper())


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """An event loop's handler of errors that nobody waited for; its own would show the error in a future's repr."""
    error = context.get("exception")
    _log.error("%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None)
