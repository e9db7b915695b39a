"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import orjson

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would gather the stream otherwise
}


def event(payload: dict[str, object]) -> bytes:
    """One event. JSON escapes line ends, so the payload is always one line."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def comment(line: str) -> bytes:
    """A line that clients ignore. Raises ValueError for more than one line."""
    if "\n" in line or "\r" in line:
        raise ValueError("a comment is one line")
    return b": " + line.encode() + b"\n\n"
