"""What the dispatcher's core asks its surroundings to do, and the stream events it is told about.

The core decides and returns these; a shell (router/runtime.py with gRPC, or a simulation) carries them out in order.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.errors import HeadraceError
from cluster.scores import Scores
from cluster.stubs.session_pb2 import FromRouter
from router.requests import TokenEvent


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A stream to a worker is up; nothing was received on it yet."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A stream to a worker ended, or could not be opened. The shell goes on trying by itself."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class OpenWatch:
    """Keep a watch stream to this address up, reconnecting with backoff, until CloseWatch."""

    address: str


@dataclass(frozen=True, slots=True)
class CloseWatch:
    address: str


@dataclass(frozen=True, slots=True)
class ReopenWatch:
    """Drop the present watch stream and connect again. No StreamClosed is reported for the dropped one."""

    address: str


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Keep a session stream to this address up, reconnecting with backoff, until CloseSession."""

    address: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Send what was queued before, then close."""

    address: str


@dataclass(frozen=True, slots=True)
class ReopenSession:
    """Drop the present session stream and connect again. No StreamClosed is reported for the dropped one."""

    address: str


@dataclass(frozen=True, slots=True)
class SendSession:
    """Send on the session that is up now; never kept for the next one."""

    address: str
    message: FromRouter


class Deliver(NamedTuple):
    """New tokens for the client of this request."""

    request_id: str
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class DeliverScores:
    """Log-probabilities of its prompt's tokens for the client of this request, all of them before its first token."""

    request_id: str
    scores: Scores


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal outcome of a request: `error` None is success. Nothing follows for this id."""

    request_id: str
    error: HeadraceError | None


Effect = (
    OpenWatch
    | CloseWatch
    | ReopenWatch
    | OpenSession
    | CloseSession
    | ReopenSession
    | SendSession
    | Deliver
    | DeliverScores
    | Finished
)
