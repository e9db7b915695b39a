"""Errors in OpenAI's shape, for HTTP statuses and for error events inside a stream."""

import logging
import math
import traceback

import orjson

from cluster.core.errors import (
    DeadlineExceeded,
    Forbidden,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestFailed,
    Unauthenticated,
    Unavailable,
)
from cluster.logs import REQUEST

_RETRY_AFTER_S = 1.0  # where nobody computed when to come back
_KINDS: dict[type[InvalidRequest], str] = {
    Unauthenticated: "authentication_error",
    Forbidden: "permission_error",
    ModelNotFound: "not_found_error",
}


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for everything that is not ours."""
    match error:
        case InvalidRequest() | Overloaded() | Unavailable() | DeadlineExceeded() | RequestFailed():
            return error.status
        case _:
            return 500


def error_headers(error: Exception) -> dict[str, str]:
    """Retry-After, in whole seconds of at least 1, where trying again makes sense; what a 401 must say."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    seconds = retry_after_s(error)
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


def retry_after_s(error: Exception) -> float | None:
    match error:
        case Overloaded():
            return error.retry_after_s
        case Unavailable():
            return _RETRY_AFTER_S
        case _:
            return None


def error_object(error: Exception) -> dict[str, object]:
    """{"error": {...}}. An error that is not ours may quote a prompt, so nothing of it is told (FAULTS O08)."""
    match error:
        case InvalidRequest():
            kind = _KINDS.get(type(error), "invalid_request_error")
            return error_shape(error.message, kind, param=error.param, code=error.code)
        case Overloaded():
            return error_shape(error.message, "rate_limit_error", code=error.code)
        case Unavailable():
            return error_shape(str(error), "server_error", code="unavailable")
        case DeadlineExceeded():
            return error_shape(str(error), "server_error", code="deadline_exceeded")
        case RequestFailed() | HeadraceError():
            return error_shape(str(error), "server_error", code="request_failed")
        case _:
            return error_shape("an internal error; see the router's log", "server_error", code="internal_error")


def error_shape(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: Exception) -> bytes:
    return orjson.dumps(error_object(error))


def log_failure(log: logging.Logger, public_id: str, error: Exception) -> None:
    """Of a request that ended with an error that is not ours: where it was, whoever formats it; not what it says."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed with %s\n%s", public_id, type(error).__name__, frames, extra={REQUEST: public_id})
