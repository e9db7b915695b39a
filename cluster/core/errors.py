"""Every error that Headrace raises on purpose. Foreign errors become one of these once, at the border.

HeadraceError
|- InvalidRequest          the client's fault: 4xx, never counts against a worker (I11)
|  |- ModelNotFound        404
|  |- Unauthenticated      401
|  `- Forbidden            403
|- Overloaded              429, with a hint when to come back
|  `- RateLimited          a tenant's own limit
|- Unavailable             503: no worker can serve this now
|- DeadlineExceeded        504
|- RequestFailed           500: accepted, but could not be finished
|  `- BrokenOff            nobody can go on with it; to a client that has nothing of it yet that is Unavailable
|- ConfigError             the operator's fault: the message names the key
|- ModelError              a model that cannot be found, converted or served
|- GrammarError            a grammar that is none, is too large, or cannot go on
|- TransferError           a peer, a read or a layout that does not fit
`- IntegrityError          our own books disagree: a bug, and the process must not go on
"""


class HeadraceError(Exception):
    """Base of all errors of this project."""


class InvalidRequest(HeadraceError):
    """A request that can never succeed as it stands.

    `param` names the offending field as the client spelt it; `code` is OpenAI's machine-readable reason.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelNotFound(InvalidRequest):
    """The named model is not the one this cluster serves."""

    status = 404


class Unauthenticated(InvalidRequest):
    """No valid credential came with the call."""

    status = 401


class Forbidden(InvalidRequest):
    """A valid key, but not for this."""

    status = 403


class Overloaded(HeadraceError):
    """No room within the deadline. `retry_after_s` is computed from the queue."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A tenant has reached a limit of its own. `retry_after_s` is when the limit allows the next request."""

    code = "rate_limit_exceeded"


class Unavailable(HeadraceError):
    """No worker can serve this now; trying again later makes sense."""

    status = 503


class DeadlineExceeded(HeadraceError):
    """The request's own deadline passed before it ended."""

    status = 504


class RequestFailed(HeadraceError):
    """An accepted request that could not be finished. What was streamed so far is right but incomplete."""

    status = 500


class BrokenOff(RequestFailed):
    """It has begun, and nobody can go on with it. The front door knows whether its client has anything of it."""


class ConfigError(HeadraceError):
    """A configuration that cannot be used; the message names the key and the value."""


class ModelError(HeadraceError):
    """A model that cannot be found, fetched, converted or served."""


class GrammarError(HeadraceError, ValueError):
    """A grammar that is none, is too large, or cannot go on. It ends the request that brought it, and no other."""


class TransferError(HeadraceError):
    """A peer or a read that failed, or two layouts that do not fit each other."""


class IntegrityError(HeadraceError):
    """Our own books contradict themselves. Never handled: the process must end rather than serve on."""
